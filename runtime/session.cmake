# The training session, and the library that the program loads when it trains.
find_package(TBB REQUIRED)
tierflow_library(session packing.cpp optimizer_work.cpp device_memory.cpp session.cpp session_setup.cpp session_export.cpp)
target_link_libraries(tierflow_session PUBLIC tierflow::models tierflow::swap tierflow::optim PRIVATE TBB::tbb)
if(NOT TIERFLOW_SANITIZE STREQUAL "thread")
  target_compile_options(tierflow_session PRIVATE -fopenmp)  # as the models: their precompiled header serves here too
endif()
target_precompile_headers(tierflow_session REUSE_FROM tierflow_models)
set_source_files_properties(packing.cpp optimizer_work.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
