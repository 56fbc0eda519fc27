# Tests of the torch models. One ctest entry: LibTorch takes longer to load than the tests to run.
add_executable(models_test
  models/adapters_test.cpp
  models/dense_weights_test.cpp
  models/distillation_test.cpp
  models/device_attention_test.cpp
  models/documents_test.cpp
  models/gradient_test.cpp
  models/gradients_test.cpp
  models/host_waits_test.cpp
  models/launches_test.cpp
  models/ops_test.cpp
  models/pairs_test.cpp
  models/router_balance_test.cpp
  models/router_test.cpp
  models/row_lanes_test.cpp
  models/step_test.cpp
  models/tiles_test.cpp
  models/products_test.cpp)
tierflow_in_batches(models_test 4 "_test[.]cpp$")
target_link_libraries(models_test PRIVATE GTest::gmock GTest::gtest_main)
add_test(NAME models_test COMMAND models_test)
# Many small parallel regions: on a busy machine threads that spin at their ends would wait for one another.
set_tests_properties(models_test PROPERTIES TIMEOUT 600 COST 900 ENVIRONMENT OMP_WAIT_POLICY=passive)

# Run by tests/python/test_models.py.
add_executable(model_probe models/model_probe.cpp)

# Run by models/speed.py, by hand.
find_package(fmt REQUIRED)
add_executable(models_speed EXCLUDE_FROM_ALL models/speed.cpp)
target_link_libraries(models_speed PRIVATE fmt::fmt-header-only)

foreach(program models_test model_probe models_speed)
  target_link_libraries(${program} PRIVATE tierflow::models tierflow::core tierflow_flags)
  target_include_directories(${program} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_compile_options(${program} PRIVATE -O1)  # torch headers: compile time over speed
endforeach()
# For the other programs of LibTorch too (session.cmake). torch/torch.h would cost each source 3 s more, used or not.
target_precompile_headers(models_test PRIVATE <torch/nn/module.h> <torch/utils.h> <gtest/gtest.h>)
function(tierflow_with_headers_of_models_test program)
  target_compile_options(${program} PRIVATE $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_OPTIONS>)
  target_precompile_headers(${program} REUSE_FROM models_test)
endfunction()
tierflow_with_headers_of_models_test(model_probe)

if(TIERFLOW_HAS_CUDA)
  # What the compiler made of the kernels: IEEE operations alone. A logarithm in double begins with an approximate
  # reciprocal, which it then refines.
  foreach(kernels dense_weights row_kernels)
    set(more)
    if(kernels STREQUAL "row_kernels")
      set(more --allow rcp.approx.ftz.f64)
    endif()
    add_test(NAME models.device_code_is_ieee.${kernels}
      COMMAND python3 "${CMAKE_SOURCE_DIR}/tests/optim/check_ptx.py" --nvcc "${TIERFLOW_NVCC}" --source "${CMAKE_SOURCE_DIR}/runtime/models/${kernels}_cuda.cu"
              --include "${CMAKE_SOURCE_DIR}" ${more} -- ${TIERFLOW_CUDA_FLAGS})
  endforeach()
endif()
