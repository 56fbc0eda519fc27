tierflow_test(session_test LIBRARIES tierflow::session SOURCES ${CMAKE_CURRENT_LIST_DIR}/session_test.cpp ${CMAKE_CURRENT_LIST_DIR}/reference_test.cpp ${CMAKE_CURRENT_LIST_DIR}/adamw8bit_test.cpp ${CMAKE_CURRENT_LIST_DIR}/memory_test.cpp ${CMAKE_CURRENT_LIST_DIR}/updates_test.cpp ${CMAKE_CURRENT_LIST_DIR}/profiler_test.cpp)
target_precompile_headers(session_test PRIVATE <torch/torch.h> <gtest/gtest.h>)
target_compile_options(session_test PRIVATE -O1)  # torch headers: compile time over speed

tierflow_test(gpu_test LABELS gpu LIBRARIES tierflow::session SOURCES ${CMAKE_CURRENT_LIST_DIR}/gpu_test.cpp)
target_precompile_headers(gpu_test REUSE_FROM session_test)
target_compile_options(gpu_test PRIVATE -O1)

add_executable(bare_torch ${CMAKE_CURRENT_LIST_DIR}/bare_torch.cpp)
target_link_libraries(bare_torch PRIVATE tierflow_torch_wheel)

# The train command in the test's own process.
tierflow_test(train_test LIBRARIES tierflow::session tierflow::options tierflow::plan fmt::fmt-header-only nlohmann_json::nlohmann_json
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/train_test.cpp ${CMAKE_CURRENT_LIST_DIR}/plan_command_test.cpp
          ${CMAKE_SOURCE_DIR}/runtime/train.cpp
          ${CMAKE_SOURCE_DIR}/runtime/run_common.cpp ${CMAKE_SOURCE_DIR}/runtime/run_result.cpp ${CMAKE_SOURCE_DIR}/runtime/run_summary.cpp
          ${CMAKE_SOURCE_DIR}/runtime/step_trace.cpp ${CMAKE_SOURCE_DIR}/runtime/training_log.cpp ${CMAKE_SOURCE_DIR}/runtime/forecast.cpp)
target_precompile_headers(train_test REUSE_FROM session_test)
target_compile_options(train_test PRIVATE -O1)
add_dependencies(train_test fake_nvml tierflow_train)  # the latter identifies what was measured
target_compile_definitions(train_test PRIVATE TIERFLOW_FAKE_NVML="$<TARGET_FILE:fake_nvml>")
