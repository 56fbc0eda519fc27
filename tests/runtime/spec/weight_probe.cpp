// Run by tests/python/test_weight_formats.py: weight_probe FORMAT DIMENSION... reads fp32 values from its input and
// writes the stored bytes; weight_probe FORMAT DIMENSION... back reads stored bytes and writes bf16 words; weight_probe
// maps writes the fp32 numbers of nf4's codes and of the dynamic map.
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "runtime/base/exception.h"
#include "runtime/spec/weight_codes.h"
#include "runtime/spec/weight_format.h"

namespace {

template <class T>
std::vector<T> input() {
  std::vector<T> all;
  std::vector<T> piece(4097);
  while (const std::size_t n = std::fread(piece.data(), sizeof(T), piece.size(), stdin))
    all.insert(all.end(), piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(n));
  return all;
}

template <class T>
int output(const std::vector<T>& all) {
  return std::fwrite(all.data(), sizeof(T), all.size(), stdout) == all.size() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view name = argc < 2 ? "" : argv[1];
  if (name == "maps") {
    std::vector<float> maps(tierflow::weights::kNf4.at, tierflow::weights::kNf4.at + 16);
    maps.insert(maps.end(), tierflow::weights::kDynamic.at, tierflow::weights::kDynamic.at + 256);
    return output(maps);
  }
  if (argc < 3) return 2;
  try {
    const auto format = tierflow::parse_weight_format(name);
    const bool back = std::string_view(argv[argc - 1]) == "back";
    std::vector<std::int64_t> shape;
    for (int i = 2; i < argc - (back ? 1 : 0); ++i) shape.push_back(std::atoll(argv[i]));
    if (!back) {
      tierflow::Quantiser quantiser(format, shape);
      quantiser.add(input<float>());
      return output(quantiser.finish());
    }
    std::vector<std::uint16_t> words(tierflow::weight_layout(format, shape).elements);
    tierflow::dequantise(format, shape, input<std::byte>(), 0, words);
    return output(words);
  } catch (const tierflow::Exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.error().kind);
  }
}
