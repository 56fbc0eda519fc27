# LibTorch from the torch wheel: imported target tierflow_torch_wheel. torch's own CMake package insists on a CUDA toolkit when the
# wheel carries CUDA; linking its libraries directly does not, so a machine without nvcc still builds.
# Without PYTHONPATH: pip sets it to hide what is installed, and the installed torch is what we want.
execute_process(COMMAND "${CMAKE_COMMAND}" -E env --unset=PYTHONPATH "${TIERFLOW_PYTHON}" -c "import importlib.util as u, importlib.metadata as m; print(m.version('torch'), u.find_spec('torch').submodule_search_locations[0], sep=';')"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status ERROR_QUIET)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "no torch wheel in ${TIERFLOW_PYTHON}: run `make setup` first, or set TIERFLOW_PYTHON, or configure with -DTIERFLOW_TORCH=OFF; with pip: install torch first, and if it is there, `pip install --no-build-isolation .`")
endif()
list(POP_FRONT found TIERFLOW_TORCH_VERSION TIERFLOW_TORCH_DIR)
add_library(tierflow_torch_wheel INTERFACE IMPORTED GLOBAL)
target_include_directories(tierflow_torch_wheel SYSTEM INTERFACE "${TIERFLOW_TORCH_DIR}/include" "${TIERFLOW_TORCH_DIR}/include/torch/csrc/api/include")
target_link_libraries(tierflow_torch_wheel INTERFACE "${TIERFLOW_TORCH_DIR}/lib/libtorch_cpu.so" "${TIERFLOW_TORCH_DIR}/lib/libc10.so")
target_link_options(tierflow_torch_wheel INTERFACE "-Wl,-rpath,${TIERFLOW_TORCH_DIR}/lib")
message(STATUS "LibTorch ${TIERFLOW_TORCH_VERSION}: ${TIERFLOW_TORCH_DIR}")
