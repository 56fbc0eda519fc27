# The training session, and the library that the program loads when it trains.
find_package(TBB REQUIRED)
tierflow_library(session packing.cpp optimizer_work.cpp stream_work.cpp chunk_io.cpp streamer.cpp streamer_plan.cpp stream_state.cpp device_memory.cpp device_memory_cuda.cpp session.cpp session_passes.cpp session_setup.cpp session_export.cpp layers.cpp adamw8bit.cpp)
target_link_libraries(tierflow_session PUBLIC tierflow::models tierflow::swap tierflow::optim PRIVATE TBB::tbb)
if(NOT TIERFLOW_SANITIZE STREQUAL "thread")
  target_compile_options(tierflow_session PRIVATE -fopenmp)  # as the models: their precompiled header serves here too
endif()
target_precompile_headers(tierflow_session REUSE_FROM tierflow_models)
set_source_files_properties(packing.cpp optimizer_work.cpp stream_work.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)

add_library(tierflow_train SHARED train_entry.cpp train.cpp run_common.cpp training_log.cpp)
target_link_libraries(tierflow_train PRIVATE tierflow::session tierflow::options tierflow_flags fmt::fmt-header-only nlohmann_json::nlohmann_json)
if(NOT TIERFLOW_SANITIZE STREQUAL "thread")
  target_compile_options(tierflow_train PRIVATE -fopenmp)
endif()
target_precompile_headers(tierflow_train REUSE_FROM tierflow_models)
set_source_files_properties(train_entry.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
add_dependencies(tierflow_program tierflow_train)
