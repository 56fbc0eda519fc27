# The training session, and the library that the program loads when it trains.
find_package(TBB REQUIRED)
# torch's CUDA allocator or its stub, chosen here and nowhere else.
if(TIERFLOW_HAS_CUDA AND EXISTS "${TIERFLOW_TORCH_DIR}/include/c10/cuda/CUDACachingAllocator.h")
  find_package(CUDAToolkit REQUIRED)
  set(TIERFLOW_DEVICE_MEMORY device/device_memory_cuda.cpp)
  list(TRANSFORM CUDAToolkit_INCLUDE_DIRS PREPEND "-isystem" OUTPUT_VARIABLE cuda_headers)
  set_source_files_properties(device/device_memory_cuda.cpp PROPERTIES COMPILE_OPTIONS "${cuda_headers}" SKIP_PRECOMPILE_HEADERS ON)
else()
  set(TIERFLOW_DEVICE_MEMORY device/device_memory_no_cuda.cpp)
endif()
tierflow_library(session
  device/device_memory.cpp device/tensor_slot.cpp ${TIERFLOW_DEVICE_MEMORY}
  batches/data_batches.cpp
  batches/teacher_batches.cpp
  optimizer/adamw8bit.cpp
  session/adapter_factors.cpp
  session/adapter_folder.cpp
  session/adapter_init.cpp
  session/adapters.cpp
  session/expert_places.cpp
  session/generator.cpp
  session/gradient_init.cpp
  session/layers.cpp
  session/merge.cpp
  session/model_sources.cpp
  session/profiler.cpp
  session/session.cpp
  session/session_balance.cpp
  session/session_batches.cpp
  session/session_export.cpp
  session/sampler.cpp
  session/schedule.cpp
  session/session_on_demand.cpp
  session/session_passes.cpp
  session/session_rows.cpp
  session/session_setup.cpp
  session/session_speculation.cpp
  session/window.cpp session/window_sum.cpp
  session/stage_probe.cpp session/stage_profiler.cpp
  state/chunk_work.cpp
  state/model_extents.cpp
  state/optimizer_work.cpp
  state/saved_parts.cpp
  state/script_model.cpp
  state/streamed_state.cpp
  state/words_ahead.cpp
  stream/durable_store.cpp
  stream/stream_state.cpp
  stream/stream_work.cpp
  stream/streamer.cpp
  stream/streamer_plan.cpp
  stream/streamer_saving.cpp)
target_link_libraries(tierflow_session PUBLIC tierflow::models tierflow::planning tierflow::swap tierflow::optim PRIVATE TBB::tbb)
if(NOT TIERFLOW_SANITIZE STREQUAL "thread")
  target_compile_options(tierflow_session PRIVATE -fopenmp)  # as the models: their precompiled header serves here too
endif()
target_precompile_headers(tierflow_session REUSE_FROM tierflow_models)
set_source_files_properties(state/chunk_work.cpp state/optimizer_work.cpp stream/stream_work.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
if(TIERFLOW_TOGETHER)
  tierflow_together(tierflow_session
    session/session.cpp
    session/session_rows.cpp
    session/session_setup.cpp
    session/session_speculation.cpp
    session/window.cpp
    session/window_sum.cpp)
  tierflow_together(tierflow_session
    session/expert_places.cpp
    session/session_balance.cpp
    session/session_batches.cpp
    session/session_export.cpp
    session/session_on_demand.cpp
    session/session_passes.cpp)
  tierflow_together(tierflow_session
    session/profiler.cpp
    session/stage_probe.cpp
    session/stage_profiler.cpp)
  tierflow_together(tierflow_session
    session/layers.cpp
    session/model_sources.cpp
    state/streamed_state.cpp
    state/words_ahead.cpp)
  tierflow_together(tierflow_session
    session/adapter_factors.cpp
    session/adapter_folder.cpp
    session/adapter_init.cpp
    session/adapters.cpp
    session/gradient_init.cpp)
  tierflow_together(tierflow_session
    session/generator.cpp
    session/merge.cpp
    session/sampler.cpp
    session/schedule.cpp
    state/model_extents.cpp)
  tierflow_together(tierflow_session
    batches/data_batches.cpp
    batches/teacher_batches.cpp
    optimizer/adamw8bit.cpp)
  tierflow_together(tierflow_session
    stream/stream_state.cpp
    stream/durable_store.cpp
    device/tensor_slot.cpp)
  tierflow_together(tierflow_session
    stream/streamer.cpp
    stream/streamer_plan.cpp
    stream/streamer_saving.cpp
    state/saved_parts.cpp
    state/script_model.cpp)
endif()

# The bodies of the commands that train; a test links them into its own process.
add_library(tierflow_commands OBJECT
  program/distillation_run.cpp
  program/document_scores.cpp
  program/eval.cpp
  program/export_beside.cpp
  program/forecast.cpp
  program/generate.cpp
  program/held_out.cpp
  program/left_run.cpp
  program/live_text.cpp
  program/preference_run.cpp
  program/profile_job.cpp
  program/run_common.cpp
  program/run_identity.cpp
  program/run_record.cpp
  program/run_result.cpp
  program/run_summary.cpp
  program/samples.cpp
  program/step_trace.cpp
  program/teacher_pass.cpp
  program/train.cpp
  program/training_log.cpp)
target_link_libraries(tierflow_commands PUBLIC tierflow::session tierflow::plan tierflow::options fmt::fmt-header-only nlohmann_json::nlohmann_json
  PRIVATE tierflow_flags)
target_compile_options(tierflow_commands PRIVATE -O1)  # reads options and prints
target_precompile_headers(tierflow_commands PRIVATE <ATen/core/Tensor.h> <fmt/format.h> <nlohmann/json.hpp>)
if(TIERFLOW_TOGETHER)
  tierflow_together(tierflow_commands
    program/document_scores.cpp
    program/eval.cpp
    program/forecast.cpp
    program/generate.cpp
    program/run_common.cpp
    program/run_result.cpp)
  tierflow_together(tierflow_commands
    program/distillation_run.cpp
    program/preference_run.cpp
    program/samples.cpp
    program/teacher_pass.cpp)
  tierflow_together(tierflow_commands
    program/export_beside.cpp
    program/live_text.cpp
    program/run_identity.cpp
    program/run_record.cpp)
  tierflow_together(tierflow_commands
    program/held_out.cpp
    program/left_run.cpp
    program/profile_job.cpp
    program/run_summary.cpp
    program/step_trace.cpp
    program/train.cpp
    program/training_log.cpp)
endif()

add_library(tierflow_train SHARED program/train_entry.cpp)
target_link_libraries(tierflow_train PRIVATE tierflow_commands tierflow_flags)
add_dependencies(tierflow_program tierflow_train)
