#pragma once
// The part of the program that computes with LibTorch: a library of its own, which is loaded where a command needs it.
#include <filesystem>
#include <string>

namespace tierflow {

// That library beside the program (build tree), or in the lib folder beside its bin folder (installed). Throws
// Exception (environment) where it is missing.
std::filesystem::path train_library();
// Which one it is, by size and time: what was measured with one is not taken for another.
std::string train_build();

}  // namespace tierflow
