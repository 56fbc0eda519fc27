#pragma once
// What a bad input must give: an Exception of that kind, with one line that holds every one of these words.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>

#include "runtime/base/exception.h"

namespace tierflow::testing {

inline void expect_refusal(io::ErrorKind kind, std::initializer_list<std::string_view> words,
                           const std::function<void()>& action) {
  try {
    action();
  } catch (const Exception& error) {
    const std::string line = error.what();
    EXPECT_EQ(error.error().kind, kind) << line;
    EXPECT_EQ(line.find('\n'), std::string::npos) << line;
    EXPECT_LT(line.size(), 2000u) << line;
    for (const auto word : words) EXPECT_NE(line.find(word), std::string::npos) << "no \"" << word << "\" in: " << line;
    return;
  }
  ADD_FAILURE() << "accepted what should be refused with: " << (words.size() == 0 ? "" : *words.begin());
}

inline void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace tierflow::testing
