#include "runtime/checkpoint/init.h"

#include <algorithm>
#include <bit>
#include <system_error>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/checkpoint/safetensors.h"

// The same bits whatever the instruction set: IEEE operations only, never fused (the project's flags see to that).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define TIERFLOW_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TIERFLOW_CLONES
#endif

namespace tierflow {
namespace {

constexpr std::size_t piece_elements = 1 << 20;

struct Key {
  std::uint32_t a, b;
};

// One key for each run of 2^32 elements.
Key key_of(const TensorSpec& tensor, std::uint64_t seed, std::uint64_t run) {
  const std::uint64_t words[2] = {XXH3_64bits_withSeed(tensor.name.data(), tensor.name.size(), seed), run};
  const std::uint64_t hash = XXH3_64bits(words, sizeof words);
  return {static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)};
}

// The index scrambled by two keyed rounds of multiply and shift.
inline std::uint32_t scramble(std::uint32_t index, Key key) {
  std::uint32_t x = index ^ key.a;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  x = (x ^ (x >> 16)) + key.b;
  x = (x ^ (x >> 17)) * 0xed5ad4bbu;
  x = (x ^ (x >> 11)) * 0xac4c1b51u;
  return x ^ (x >> 15);
}

inline float natural_log(float value) {
  // value = 2^exponent * m with m in [sqrt(1/2), sqrt(2)).
  const std::int32_t bits = std::bit_cast<std::int32_t>(value);
  const std::int32_t exponent = (bits - 0x3f3504f3) >> 23;
  const float t = std::bit_cast<float>(bits - (exponent << 23)) - 1.0f;
  float r = 0.11958350f;
  r = r * t - 0.18396002f;
  r = r * t + 0.20388702f;
  r = r * t - 0.24935286f;
  r = r * t + 0.33322856f;
  r = r * t - 0.50000590f;
  return static_cast<float>(exponent) * 0.69314718f + (t + t * t * r);
}

// The standard normal quantile of a 32-bit word: the top bit is the sign, the rest the tail probability p = (m + 1/2) /
// 2^32 in (0, 1/2). With v = 1 - 2p and s = sqrt(-ln(4p(1-p))), quantile / v is smooth in s; the polynomial was fitted
// to 4e-5 relative.
inline float normal_quantile(std::uint32_t word) {
  const float p = (static_cast<float>(static_cast<std::int32_t>(word & 0x7fffffffu)) + 0.5f) * 0x1p-32f;
  const float w = -natural_log(4.0f * p * (1.0f - p));
  const float s = __builtin_sqrtf(w > 0.0f ? w : 0.0f);
  const float x = s * (2.0f / 4.65f) - 1.0f;
  float q = -0.21653110f;
  q = q * x - 0.06621075f;
  q = q * x + 0.75424343f;
  q = q * x + 0.08186478f;
  q = q * x - 1.10153747f;
  q = q * x + 0.20821613f;
  q = q * x + 0.88489211f;
  q = q * x - 0.85145813f;
  q = q * x + 0.42252415f;
  q = q * x + 3.18003964f;
  q = q * x + 3.06222558f;
  const float magnitude = q * (1.0f - 2.0f * p);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) ^ (word & 0x80000000u));
}

TIERFLOW_CLONES void fill_normal(Key key, std::uint32_t first, float std, float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    out[i] = std * normal_quantile(scramble(first + static_cast<std::uint32_t>(i), key));
}

// Uniform between -sqrt(3) std and sqrt(3) std.
TIERFLOW_CLONES void fill_uniform(Key key, std::uint32_t first, float std, float* out, std::size_t count) {
  const float width = std * 1.7320508f * 0x1p-23f;
  for (std::size_t i = 0; i < count; ++i) {
    const auto word = static_cast<std::int32_t>(scramble(first + static_cast<std::uint32_t>(i), key) >> 8);
    out[i] = width * (static_cast<float>(word) - (0x1p23f - 0.5f));
  }
}

TIERFLOW_CLONES void round_to_bf16(const float* values, std::uint16_t* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(values[i]);
    out[i] = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

// The folder is new, empty of weights, and has no other config.json.
void check_target(const ModelSpec& spec, const std::filesystem::path& folder) {
  std::error_code ignored;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"})
    if (std::filesystem::exists(folder / name, ignored))
      fail(io::ErrorKind::usage, folder.string(), "already holds a model; give a new folder");
  const auto config = folder / "config.json";
  if (std::filesystem::exists(config, ignored) && read_text(config, 16 << 20) != spec.config_json)
    fail(io::ErrorKind::usage, config.string(), "already exists and differs; give a new folder");
}

}  // namespace

std::uint16_t to_bf16(float value) {
  if (value != value) return 0x7fc0;
  std::uint16_t half = 0;
  round_to_bf16(&value, &half, 1);
  return half;
}

void initial_values(const TensorSpec& tensor, std::uint64_t seed, std::uint64_t first, std::span<float> out) {
  if (tensor.init == Init::ones || tensor.init == Init::zeros) {
    std::fill(out.begin(), out.end(), tensor.init == Init::ones ? 1.0f : 0.0f);
    return;
  }
  first += static_cast<std::uint64_t>(tensor.first_element());
  while (!out.empty()) {
    const std::uint64_t left_in_run = (std::uint64_t{1} << 32) - (first & 0xffffffffu);
    const std::size_t count = std::min<std::uint64_t>(out.size(), left_in_run);
    const auto fill = tensor.init == Init::normal ? fill_normal : fill_uniform;
    fill(key_of(tensor, seed, first >> 32), static_cast<std::uint32_t>(first), static_cast<float>(tensor.init_std),
         out.data(), count);
    out = out.subspan(count);
    first += count;
  }
}

void init_checkpoint(const std::filesystem::path& config_json, const std::filesystem::path& folder, std::uint64_t seed,
                     std::uint64_t shard_bytes, const std::function<bool()>& stop, const std::string& as) {
  const ModelSpec spec = read_model_spec(config_json, Tiling::none(), as);  // files hold whole tensors
  check_target(spec, folder);
  std::vector<TensorHeader> headers;
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors)
      headers.push_back({.name = tensor.name, .dtype = dtype_of(tensor), .shape = tensor.shape});
  CheckpointWriter writer(folder, std::move(headers), shard_bytes);
  std::vector<float> values(piece_elements);
  std::vector<std::uint16_t> halves(piece_elements);
  for (const UnitSpec& unit : spec.units)
    for (const TensorSpec& tensor : unit.tensors) {
      const auto elements = static_cast<std::uint64_t>(tensor.elements());
      for (std::uint64_t first = 0; first < elements; first += piece_elements) {
        if (stop && stop()) fail(io::ErrorKind::cancelled, folder.string(), "stopped; nothing was kept");
        const std::size_t count = std::min<std::uint64_t>(piece_elements, elements - first);
        initial_values(tensor, seed, first, std::span(values).first(count));
        if (dtype_of(tensor) == Dtype::f32) {
          writer.write(std::as_bytes(std::span(values).first(count)));
          continue;
        }
        round_to_bf16(values.data(), halves.data(), count);
        writer.write(std::as_bytes(std::span(halves).first(count)));
      }
    }
  writer.finish(spec.config_json);
}

}  // namespace tierflow
