# install(): the program, and what find_package(tierflow) needs: headers under include/tierflow, static libraries, CMake files.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/tierflow")

# tierflow::tierflow is everything that was built.
add_library(tierflow INTERFACE)
target_compile_features(tierflow INTERFACE cxx_std_20)
set(libraries io optim swap core planning)
if(TIERFLOW_TORCH)
  list(APPEND libraries models session)
endif()
set(targets tierflow)
foreach(library ${libraries})
  set_target_properties(tierflow_${library} PROPERTIES EXPORT_NAME ${library})
  list(APPEND targets tierflow_${library})
  target_link_libraries(tierflow INTERFACE tierflow_${library})
endforeach()

install(TARGETS ${targets} EXPORT tierflow ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(EXPORT tierflow NAMESPACE tierflow:: FILE tierflow-targets.cmake DESTINATION "${package_folder}")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/tierflow-config.cmake.in" "${CMAKE_BINARY_DIR}/tierflow-config.cmake"
  INSTALL_DESTINATION "${package_folder}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/tierflow-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/tierflow-config.cmake" "${CMAKE_BINARY_DIR}/tierflow-config-version.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/FindTorchWheel.cmake" DESTINATION "${package_folder}")
foreach(folder io optim swap runtime)
  install(DIRECTORY ${folder} DESTINATION include/tierflow FILES_MATCHING PATTERN "*.h" PATTERN "*-inl.h" EXCLUDE)
endforeach()

install(TARGETS tierflow_program RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
if(TIERFLOW_TORCH)
  install(TARGETS tierflow_train LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
