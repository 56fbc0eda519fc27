#include "runtime/checkpoint/weights_hash.h"

#include <algorithm>

#include "io/checksum.h"

namespace tierflow {

std::uint64_t weights_hash(const Checkpoint& checkpoint, const std::set<std::string>& without) {
  constexpr std::uint64_t kSample = 1024;
  std::vector<std::uint64_t> hashes;
  std::vector<float> values;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (without.contains(name)) continue;
    hashes.push_back(io::content_hash(std::as_bytes(std::span(name))));
    std::uint64_t elements = 1;
    for (const std::int64_t size : tensor.shape) {
      hashes.push_back(static_cast<std::uint64_t>(size));
      elements *= static_cast<std::uint64_t>(size);
    }
    values.resize(std::min(elements, kSample));
    const std::uint64_t last = elements - values.size();
    for (const std::uint64_t first : {std::uint64_t{0}, last / 2, last}) {
      checkpoint.read_f32(name, first, values);
      hashes.push_back(io::content_hash(std::as_bytes(std::span(values))));
    }
  }
  return io::content_hash(std::as_bytes(std::span(hashes)));
}

}  // namespace tierflow
