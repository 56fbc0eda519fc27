#include "runtime/checkpoint/init.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "runtime/checkpoint/source_folder.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

TensorSpec normal(const char* name) {
  return {.name = name, .shape = {1}, .init_std = 2.0};
}

TEST(Init, AnyCutHasTheSameValues) {
  std::vector<float> whole(5000);
  const std::uint64_t start = (std::uint64_t{1} << 32) - 2500;  // across the end of a key's run
  initial_values(normal("a"), 3, start, whole);
  for (const std::size_t cut : {1, 7, 2500, 2501, 4999}) {
    std::vector<float> part(whole.size() - cut);
    initial_values(normal("a"), 3, start + cut, part);
    EXPECT_EQ(std::memcmp(part.data(), whole.data() + cut, part.size() * sizeof(float)), 0);
  }
}

TEST(Init, FixedValuesOnEveryMachine) {
  std::vector<float> values(4);
  initial_values(normal("model.norm"), 0, 0, values);
  std::vector<std::uint32_t> bits(4);
  std::memcpy(bits.data(), values.data(), 16);
  EXPECT_EQ(bits, (std::vector<std::uint32_t>{1064928724, 1070205788, 3207192902, 3206592597}));
}

TEST(Init, ValuesAreNormalAndIndependent) {
  constexpr std::size_t n = 1 << 20;
  std::vector<float> a(n), b(n), c(n);
  initial_values(normal("a"), 1, 0, a);
  initial_values(normal("b"), 1, 0, b);
  initial_values(normal("a"), 2, 0, c);
  double mean = 0, square = 0, fourth = 0, lag = 0, names = 0, seeds = 0, beyond = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double x = a[i] / 2.0;
    mean += x;
    square += x * x;
    fourth += x * x * x * x;
    lag += i == 0 ? 0 : x * a[i - 1] / 2.0;
    names += x * b[i] / 2.0;
    seeds += x * c[i] / 2.0;
    beyond += std::abs(x) > 3 ? 1 : 0;
  }
  // Five standard errors each.
  EXPECT_NEAR(mean / n, 0, 5e-3);
  EXPECT_NEAR(square / n, 1, 7e-3);
  EXPECT_NEAR(fourth / n, 3, 5e-2);
  EXPECT_NEAR(lag / n, 0, 5e-3);
  EXPECT_NEAR(names / n, 0, 5e-3);
  EXPECT_NEAR(seeds / n, 0, 5e-3);
  EXPECT_NEAR(beyond / n, 0.0026998, 2.6e-4);
}

TEST(Init, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f), 0x3f80);
  EXPECT_EQ(to_bf16(std::nextafter(1.00390625f, 2.0f)), 0x3f81);
  EXPECT_EQ(to_bf16(1.00390625f), 0x3f80);  // half way, down to even
  EXPECT_EQ(to_bf16(1.01171875f), 0x3f82);  // half way, up to even
  EXPECT_EQ(to_bf16(-INFINITY), 0xff80);
  EXPECT_EQ(to_bf16(NAN), 0x7fc0);
}

TEST(Init, AFolderThatIsAModel) {
  testing::TempDir dir;
  const fs::path config = dir.path() / "config.json", out = dir.path() / "out";
  testing::write_file(config,
                      R"({"architectures":["LlamaForCausalLM"],"vocab_size":300,"hidden_size":64,"intermediate_size":96,
    "num_hidden_layers":2,"num_attention_heads":4})");
  init_checkpoint(config, out, 7, 60000);
  const ModelSpec spec = read_model_spec(out / "config.json");
  const auto model = Checkpoint::open(out);
  EXPECT_GT(model.files().size(), 1u);
  check_tensors(spec, model);
  std::vector<float> want(64 * 64), have(64 * 64);
  initial_values(spec.units[2].tensors[0], 7, 0, want);
  model.read_f32(spec.units[2].tensors[0].name, 0, have);
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(have[i], want[i], std::abs(want[i]) / 256);
  testing::expect_refusal(io::ErrorKind::usage, {"already holds a model"}, [&] { init_checkpoint(config, out, 7); });
  testing::write_file(dir.path() / "used" / "config.json", "{}");
  testing::expect_refusal(io::ErrorKind::usage, {"differs"}, [&] { init_checkpoint(config, dir.path() / "used", 7); });
  EXPECT_NO_THROW(init_checkpoint(config, dir.path(), 7));  // beside the config itself
}

TEST(Init, StopsWhenItIsToldToAndLeavesNothing) {
  testing::TempDir dir;
  const fs::path config = dir.path() / "config.json", out = dir.path() / "out";
  testing::write_file(config,
                      R"({"architectures":["LlamaForCausalLM"],"vocab_size":300,"hidden_size":64,"intermediate_size":96,
    "num_hidden_layers":2,"num_attention_heads":4})");
  int asked = 0;
  testing::expect_refusal(io::ErrorKind::cancelled, {"stopped"},
                          [&] { init_checkpoint(config, out, 7, 60000, [&] { return ++asked == 5; }); });
  EXPECT_EQ(asked, 5);
  EXPECT_FALSE(fs::exists(out));
}

TEST(Init, ATileHasTheValuesOfItsRows) {
  TensorSpec whole{.name = "lm_head.weight", .shape = {40, 8}, .init_std = 1.0}, tile = whole;
  tile.shape[0] = 10;
  tile.first_row = 30;
  tile.all_rows = 40;
  std::vector<float> all(320), part(80);
  initial_values(whole, 7, 0, all);
  initial_values(tile, 7, 5, std::span(part).first(75));
  for (std::size_t i = 0; i < 75; ++i) ASSERT_EQ(part[i], all[240 + 5 + i]);
}

}  // namespace
}  // namespace tierflow
