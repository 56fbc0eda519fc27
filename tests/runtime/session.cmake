tierflow_test(session_test BY_SUITE LIBRARIES tierflow::session SOURCES
  batches/data_batches_test.cpp
  state/streamed_state_test.cpp
  state/chunk_work_test.cpp
  state/optimizer_work_test.cpp
  stream/streamer_test.cpp
  session/session_test.cpp
  session/adapters_test.cpp
  session/adapter_memory_test.cpp
  ../support/counted_heap.cpp
  session/reference_test.cpp
  session/golden_losses_test.cpp
  optimizer/adamw8bit_test.cpp
  session/memory_test.cpp
  session/packed_test.cpp
  session/mixture_test.cpp
  session/updates_test.cpp
  session/device_state_test.cpp
  session/speculation_test.cpp
  session/embedding_rows_test.cpp
  session/window_test.cpp
  session/window_reference_test.cpp
  session/resume_test.cpp
  session/profiler_test.cpp
  session/generate_test.cpp
  session/talk_test.cpp
  session/dropout_test.cpp
  session/distillation_test.cpp
  device/default_stream_test.cpp
  device/device_memory_test.cpp)
if(TIERFLOW_TOGETHER)
  tierflow_together(session_test batches/data_batches_test.cpp state/streamed_state_test.cpp stream/streamer_test.cpp session/session_test.cpp)
  tierflow_together(session_test session/adapters_test.cpp session/adapter_memory_test.cpp session/reference_test.cpp optimizer/adamw8bit_test.cpp)
  tierflow_together(session_test session/packed_test.cpp session/mixture_test.cpp session/window_test.cpp)
  tierflow_together(session_test session/device_state_test.cpp session/window_reference_test.cpp session/profiler_test.cpp session/generate_test.cpp)
  tierflow_together(session_test session/memory_test.cpp session/talk_test.cpp session/dropout_test.cpp session/distillation_test.cpp)
  tierflow_together(session_test session/updates_test.cpp session/embedding_rows_test.cpp device/default_stream_test.cpp device/device_memory_test.cpp)
endif()
set_source_files_properties(session/golden_losses_test.cpp PROPERTIES COMPILE_DEFINITIONS TIERFLOW_GOLDEN_LOSSES="${CMAKE_CURRENT_SOURCE_DIR}/session/golden/losses.txt")

tierflow_test(gpu_test BY_SUITE LABELS gpu LIBRARIES tierflow::session SOURCES session/gpu_test.cpp session/own_layers_gpu_test.cpp
  models/dense_weights_gpu_test.cpp models/attention_gpu_test.cpp models/row_kernels_gpu_test.cpp)
tierflow_test(experts_on_demand_test BY_SUITE LIBRARIES tierflow::session SOURCES session/experts_on_demand_test.cpp)
tierflow_test(own_layers_test BY_SUITE LIBRARIES tierflow::session SOURCES session/own_layers_test.cpp session/own_layers_rules_test.cpp
  session/outer_adapters_test.cpp)
tierflow_test(references_test BY_SUITE LIBRARIES tierflow::session SOURCES session/references_test.cpp)
tierflow_test(expert_adapters_test BY_SUITE LIBRARIES tierflow::session SOURCES models/expert_adapters_test.cpp session/expert_adapters_test.cpp)

add_executable(bare_torch session/bare_torch.cpp)
target_link_libraries(bare_torch PRIVATE tierflow::core tierflow_torch_wheel)

# The train command in the test's own process.
tierflow_test(train_test BY_SUITE LIBRARIES tierflow_commands SOURCES
  program/live_text_test.cpp
  program/train_test.cpp
  program/training_log_test.cpp
  program/plan_command_test.cpp)
add_dependencies(train_test fake_nvml tierflow_train)  # the latter identifies what was measured
target_compile_definitions(train_test PRIVATE TIERFLOW_FAKE_NVML="$<TARGET_FILE:fake_nvml>")

# Run by tests/python/test_examples.py.
add_executable(own_lora "${CMAKE_SOURCE_DIR}/examples/cpp/own_lora.cpp")
target_link_libraries(own_lora PRIVATE tierflow::session tierflow_flags)
target_include_directories(own_lora PRIVATE "${CMAKE_SOURCE_DIR}")
target_compile_options(own_lora PRIVATE -O1)

# Run by tests/python/test_adapters.py.
add_executable(adapter_probe session/adapter_probe.cpp)
target_link_libraries(adapter_probe PRIVATE tierflow::session tierflow_flags)
target_include_directories(adapter_probe PRIVATE "${CMAKE_SOURCE_DIR}")
target_compile_options(adapter_probe PRIVATE -O1)

# Whether torch's CUDA library is loaded before main(): a program that claims a card by answering for access().
tierflow_test(early_load_test LIBRARIES tierflow_flags SOURCES device/early_load_test.cpp)
get_target_property(sources tierflow_session SOURCES)
if("device/device_memory_cuda.cpp" IN_LIST sources)
  add_executable(early_load_probe device/early_load_probe.cpp)
  target_link_libraries(early_load_probe PRIVATE tierflow::session tierflow_flags)
  target_compile_options(early_load_probe PRIVATE -O1)
  # The library's object is in the program, as it is in one that trains.
  target_link_options(early_load_probe PRIVATE -Wl,--wrap=access -Wl,--undefined=_ZN8tierflow12DeviceMemory4cudaEv)
  add_dependencies(early_load_test early_load_probe)
  target_compile_definitions(early_load_test PRIVATE TIERFLOW_EARLY_LOAD_PROBE="$<TARGET_FILE:early_load_probe>")
else()
  target_compile_definitions(early_load_test PRIVATE TIERFLOW_EARLY_LOAD_PROBE="")
endif()

# Part of the kit for a borrowed machine with a GPU.
add_executable(device_bench "${CMAKE_SOURCE_DIR}/benchmarks/gpu/device_bench.cpp")
target_link_libraries(device_bench PRIVATE tierflow::session nlohmann_json::nlohmann_json tierflow_flags)
target_include_directories(device_bench PRIVATE "${CMAKE_SOURCE_DIR}")
target_compile_options(device_bench PRIVATE -O1)

# What a kit for a borrowed machine has been built from; where CUPTI is installed, with what logs a program's kernels.
add_custom_target(gpu_kit_programs DEPENDS tierflow_program device_test optim_gpu_test gpu_test device_bench)
if(TIERFLOW_HAS_CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()
if(TARGET CUDA::cupti)
  add_library(kernel_log SHARED EXCLUDE_FROM_ALL "${CMAKE_SOURCE_DIR}/tools/gpu_kit/kernel_log.cpp")
  target_link_libraries(kernel_log PRIVATE CUDA::cupti tierflow_flags)
  add_dependencies(gpu_kit_programs kernel_log)
endif()

foreach(program session_test gpu_test experts_on_demand_test own_layers_test references_test expert_adapters_test adapter_probe device_bench)
  tierflow_with_headers_of_models_test(${program})
endforeach()
