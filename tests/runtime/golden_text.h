#pragma once
// What parsers make of many inputs, as a text that a file of the tree holds.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace tierflow::testing {

// Its lines, without empty ones and those that begin with #.
inline std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in) << path;
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);)
    if (!line.empty() && line[0] != '#') lines.push_back(line);
  return lines;
}

// The text equals the file, to the first line that differs. With TIERFLOW_WRITE_GOLDEN=1 in the environment the file is
// written anew; `git diff` then shows what else changed.
inline void expect_golden(const std::string& path, const std::string& text) {
  if (std::getenv("TIERFLOW_WRITE_GOLDEN") != nullptr) std::ofstream(path) << text;
  std::ifstream in(path);
  std::istringstream now(text);
  std::string expected, line;
  for (int number = 1; std::getline(now, line); ++number) {
    ASSERT_TRUE(std::getline(in, expected)) << path << " has no line " << number << ", now: " << line;
    ASSERT_EQ(line, expected) << path << ", line " << number;
  }
  EXPECT_FALSE(std::getline(in, expected)) << path << " has more: " << expected;
}

}  // namespace tierflow::testing
