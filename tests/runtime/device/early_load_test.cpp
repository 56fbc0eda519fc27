// torch's CUDA library is loaded before main() where a card's driver is: ATen asks for its hooks once and for good.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

std::string said_with(const char* card) {
  ::setenv("CARD", card, 1);
  FILE* probe = ::popen(TIERFLOW_EARLY_LOAD_PROBE, "r");
  if (probe == nullptr) return "it did not start";
  std::string said;
  std::array<char, 256> line;
  while (std::fgets(line.data(), line.size(), probe) != nullptr) said += line.data();
  const int status = ::pclose(probe);
  return status == 0 ? said : said + "status " + std::to_string(status);
}

class EarlyLoad : public ::testing::Test {
  void SetUp() override {
    if (std::string(TIERFLOW_EARLY_LOAD_PROBE).empty()) GTEST_SKIP() << "this build has no CUDA";
  }
};

TEST_F(EarlyLoad, TorchsCudaLibraryIsThereWhenMainBeginsWhereACardIs) {
  EXPECT_EQ(said_with("/dev/nvidiactl"), "loaded, CUDA's hooks\n");
  EXPECT_EQ(said_with("/dev/dxg"), "loaded, CUDA's hooks\n");
}

TEST_F(EarlyLoad, AMachineWithoutACardDoesNotLoadIt) {
  EXPECT_EQ(said_with(""), "not loaded, no hooks\n");
}

}  // namespace
