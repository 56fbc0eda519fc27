#include "runtime/checkpoint/weights_hash.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/checksum.h"
#include "runtime/checkpoint/source_folder.h"

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

std::uint64_t weights_hash(const std::filesystem::path& folder, const std::string& as) {
  const auto checkpoint = std::make_shared<const Checkpoint>(Checkpoint::open(folder));
  std::set<std::string> copied;
  for (const TensorHeader& header : SourceFolder(read_folder_spec(folder, Tiling::none(), as), checkpoint).headers())
    copied.insert(header.name);
  return weights_hash(*checkpoint, copied);
}

std::string hash_text(std::uint64_t hash) {
  return fmt::format("{:016x}", hash);
}

}  // namespace tierflow
