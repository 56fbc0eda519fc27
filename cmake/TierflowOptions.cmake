# Flags that every target of the project shares, and tierflow_library(), tierflow_test().
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(TIERFLOW_CCACHE ccache)
if(TIERFLOW_CCACHE)
  # Without these ccache leaves out what uses a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${TIERFLOW_CCACHE}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()

# The fastest linker at hand: the torch libraries make the default one slow.
include(CheckLinkerFlag)
foreach(linker mold lld)
  check_linker_flag(CXX -fuse-ld=${linker} TIERFLOW_HAS_${linker})
  if(TIERFLOW_HAS_${linker})
    add_link_options($<$<LINK_LANGUAGE:CXX>:-fuse-ld=${linker}>)
    break()
  endif()
endforeach()

add_library(tierflow_flags INTERFACE)
# -ffp-contract=off: the optimizer's bits may not depend on which multiplications the compiler fuses.
target_compile_options(tierflow_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-missing-field-initializers -ffp-contract=off>)
if(TIERFLOW_SANITIZE)
  target_compile_options(tierflow_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TIERFLOW_SANITIZE} -fno-omit-frame-pointer -g>)
  target_link_options(tierflow_flags INTERFACE -fsanitize=${TIERFLOW_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # as its manual says, false with sanitizers: of the standard library's and LibTorch's headers
    target_compile_options(tierflow_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized;-Wno-array-bounds>)
  endif()
  if(TIERFLOW_SANITIZE STREQUAL "address")
    target_compile_options(tierflow_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=undefined -fno-sanitize-recover=undefined>)
    target_link_options(tierflow_flags INTERFACE -fsanitize=undefined)
  endif()
endif()

# tierflow_library(NAME SOURCES... ): a static library rooted at the top of the tree, so that includes read "io/volume.h".
function(tierflow_library name)
  add_library(tierflow_${name} STATIC ${ARGN})
  add_library(tierflow::${name} ALIAS tierflow_${name})
  target_include_directories(tierflow_${name} PUBLIC "$<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}>" "$<INSTALL_INTERFACE:include/tierflow>")
  target_link_libraries(tierflow_${name} PRIVATE $<BUILD_INTERFACE:tierflow_flags>)
endfunction()

# tierflow_together(TARGET SOURCE...): these sources of the target compile as one unit.
function(tierflow_together target)
  list(GET ARGN 0 first)
  string(MAKE_C_IDENTIFIER "${first}" group)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${group})
endfunction()

# tierflow_in_batches(TARGET SIZE PATTERN): with TIERFLOW_TOGETHER, the sources of the target that fit the pattern compile so many at a time.
function(tierflow_in_batches target size pattern)
  if(NOT TIERFLOW_TOGETHER)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "${pattern}")
  set(batch)
  foreach(source ${sources})
    list(APPEND batch ${source})
    list(LENGTH batch count)
    if(count EQUAL size)
      tierflow_together(${target} ${batch})
      set(batch)
    endif()
  endforeach()
  if(batch)
    tierflow_together(${target} ${batch})
  endif()
endfunction()

# tierflow_test(NAME [BY_SUITE] [PRECOMPILED] [LABELS label] [PREFIX prefix] LIBRARIES lib... SOURCES file...): one GoogleTest program, one ctest entry for
# each of its tests. Tests that two programs have take the prefix in one of them. BY_SUITE: one entry for each suite, for programs that load
# LibTorch, which takes longer than most of their tests; a report of the suite's tests lies in test-reports/suites then, and
# tools/test_totals.py puts it in the entry's place. PRECOMPILED: headers that most tests include are compiled once, which pays from about
# five sources on.
function(tierflow_test name)
  cmake_parse_arguments(T "BY_SUITE;PRECOMPILED" "LABELS;PREFIX" "LIBRARIES;SOURCES" ${ARGN})
  add_executable(${name} ${T_SOURCES})
  target_link_libraries(${name} PRIVATE ${T_LIBRARIES} tierflow_flags GTest::gmock GTest::gtest_main)
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  if(TIERFLOW_QUICK_TESTS)
    target_compile_options(${name} PRIVATE -O0)
  else()
    target_compile_options(${name} PRIVATE -O1)  # compile time over speed
  endif()
  if(TIERFLOW_QUICK_TESTS OR T_PRECOMPILED)
    target_precompile_headers(${name} PRIVATE <gmock/gmock.h> <gtest/gtest.h> <filesystem> <fstream> <functional> <map> <random> <string> <thread> <vector>)
  endif()
  if(T_BY_SUITE)
    tierflow_suites(${name} "${T_LABELS}")
    return()
  endif()
  gtest_discover_tests(${name} TEST_PREFIX "${T_PREFIX}" DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 600 ENVIRONMENT OMP_WAIT_POLICY=passive
    LABELS "${T_LABELS}")
endfunction()

# The ctest entries of a program by suite, as tools/list_suites.py writes them when the program was built.
function(tierflow_suites name labels)
  set(list "${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake")
  add_custom_command(TARGET ${name} POST_BUILD BYPRODUCTS "${list}" VERBATIM
    COMMAND "${CMAKE_COMMAND}" -E env OMP_WAIT_POLICY=passive python3 "${CMAKE_SOURCE_DIR}/tools/list_suites.py" "$<TARGET_FILE:${name}>" "${list}"
            --reports "${CMAKE_BINARY_DIR}/test-reports/suites" --label "${labels}")
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/${name}_include.cmake"
    "if(EXISTS \"${list}\")\n  include(\"${list}\")\nelse()\n  add_test(${name}_NOT_BUILT ${name}_NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${CMAKE_CURRENT_BINARY_DIR}/${name}_include.cmake")
endfunction()
