#include "swap/store.h"

#include <xxhash.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "io/checksum.h"

namespace tierflow::swap {
namespace {

using nlohmann::json;

constexpr std::uint64_t kSuperblockSpacing = std::uint64_t{1} << 20;
constexpr std::uint64_t kManifestBase = 2 * kSuperblockSpacing;
constexpr int kVersion = 1;

struct Superblock {
  char magic[8] = {'T', 'F', 'S', 'T', 'O', 'R', 'E', '1'};
  std::uint64_t version = kVersion;
  std::uint64_t run_id = 0;
  std::uint64_t generation = 0;
  std::uint64_t manifest_offset = 0, manifest_length = 0, manifest_checksum = 0;
  std::uint64_t checksum = 0;  // of the fields before it

  std::uint64_t own_checksum() const { return XXH3_64bits(this, offsetof(Superblock, checksum)); }
};

const char* kind_name(ExtentKind kind) {
  static constexpr const char* kNames[] = {"hi", "state", "gradient", "gradient sum", "activations"};
  return kNames[static_cast<int>(kind)];
}

io::Error corrupt(std::string detail) {
  return {.kind = io::ErrorKind::corruption, .operation = "open the store", .detail = std::move(detail)};
}

io::Error transfer(io::Volume& volume, io::Op op, std::uint64_t offset, io::Buffer& buffer, std::size_t length) {
  std::mutex mutex;
  std::condition_variable arrived;
  bool done = false;
  io::Error error;
  volume.submit({.op = op, .offset = offset, .length = length, .buffer = std::move(buffer)},
                [&](io::Completion&& completion) {
                  std::lock_guard lock(mutex);
                  buffer = std::move(completion.buffer);
                  error = std::move(completion.error);
                  done = true;
                  arrived.notify_one();
                });
  std::unique_lock lock(mutex);
  arrived.wait(lock, [&] { return done; });
  return error;
}

struct Found {
  Superblock block;
  std::string text;  // of the manifest
};

io::Result<Found> newest_manifest(io::Volume& volume) {
  std::vector<Superblock> blocks;
  io::Buffer sector = io::allocate_buffer(kSector);
  for (int copy = 0; copy < 2 && volume.size() >= kManifestBase; ++copy) {
    if (io::Error error = transfer(volume, io::Op::read, copy * kSuperblockSpacing, sector, kSector)) return error;
    Superblock block;
    std::memcpy(static_cast<void*>(&block), sector.data(), sizeof block);
    if (std::memcmp(block.magic, Superblock{}.magic, sizeof block.magic) == 0 &&
        block.checksum == block.own_checksum() && block.version == kVersion && block.manifest_length < volume.size() &&
        block.manifest_offset <= volume.size() - round_up(block.manifest_length, kSector))
      blocks.push_back(block);
  }
  std::sort(blocks.begin(), blocks.end(),
            [](const Superblock& a, const Superblock& b) { return a.generation > b.generation; });
  for (const Superblock& block : blocks) {
    io::Buffer buffer = io::allocate_buffer(round_up(block.manifest_length, kSector));
    if (!buffer)
      return io::Error{.kind = io::ErrorKind::memory, .operation = "open the store", .length = block.manifest_length};
    if (io::Error error = transfer(volume, io::Op::read, block.manifest_offset, buffer, buffer.size())) return error;
    if (XXH3_64bits(buffer.data(), block.manifest_length) == block.manifest_checksum)
      return Found{block, std::string(reinterpret_cast<const char*>(buffer.data()), block.manifest_length)};
  }
  return corrupt("it holds no committed generation: the run that made it ended before its first commit");
}

}  // namespace

Store::Store(StoreOptions options, const Layout& layout) : options_(std::move(options)), layout_(layout) {
  const auto& chunks = layout.chunks();
  for (int kind = 0; kind < kExtentKinds; ++kind) {
    records_[kind].resize(chunks.size());
    pending_checksum_[kind].resize(chunks.size());
  }
  for (const Chunk& chunk : chunks) {
    hi_offset_.push_back(hi_bytes_);
    hi_bytes_ += chunk.word_bytes();
    state_offset_.push_back(state_bytes_);
    if (chunk.trainable) state_bytes_ += chunk.state_bytes;
    gradient_offset_.push_back(gradient_bytes_);
    const std::size_t id = gradient_offset_.size() - 1;
    if (options_.staged_gradients && (options_.gradient_chunks.empty() || options_.gradient_chunks[id]))
      gradient_bytes_ += chunk.word_bytes();
  }
  manifest_bytes_ = round_up((std::uint64_t{1} << 20) + options_.identity.size() + 160 * chunks.size(), kSector);
  total_bytes_ = kManifestBase + 2 * manifest_bytes_ + options_.generations * (hi_bytes_ + state_bytes_) +
                 gradient_bytes_ + (options_.gradient_sums ? hi_bytes_ : 0);
  const auto activations = static_cast<int>(ExtentKind::activations);
  records_[activations].resize(options_.activation_bytes.size());
  pending_checksum_[activations].resize(options_.activation_bytes.size());
  for (const std::uint64_t bytes : options_.activation_bytes) {
    activation_offset_.push_back(total_bytes_);
    total_bytes_ += bytes;
  }
}

std::uint64_t Store::bytes_needed(const StoreOptions& options, const Layout& layout) {
  return Store(options, layout).total_bytes_;
}

io::Result<std::unique_ptr<Store>> Store::create(StoreOptions options, const Layout& layout) {
  std::unique_ptr<Store> store(new Store(std::move(options), layout));
  std::random_device random;
  store->run_id_ = (std::uint64_t{random()} << 32) | random();
  io::VolumeOptions volume_options = store->options_.volume;
  volume_options.bytes = store->total_bytes_;
  auto volume = io::Volume::create(volume_options);
  if (!volume.ok()) return volume.error();
  store->volume_ = std::move(volume).value();
  return store;
}

io::Result<Store::Contents> Store::inspect(const io::VolumeOptions& options) {
  auto volume = io::Volume::open(options);
  if (!volume.ok()) return volume.error();
  auto found = newest_manifest(**volume);
  if (!found.ok()) return found.error();
  const json manifest = json::parse(found->text, nullptr, false);
  if (!manifest.is_object()) return corrupt("its manifest cannot be read");
  return Contents{.identity = manifest.value("identity", ""),
                  .progress = manifest.value("progress", ""),
                  .chunk_elements = manifest.value("chunk_elements", std::uint64_t{0}),
                  .generations = manifest.value("generations", 1),
                  .staged_gradients = manifest.value("staged_gradients", false),
                  .gradient_chunks = manifest.value("gradient_chunks", std::vector<bool>{})};
}

io::Result<std::unique_ptr<Store>> Store::open(StoreOptions options, const Layout& layout) {
  options.activation_bytes.clear();
  std::unique_ptr<Store> store(new Store(std::move(options), layout));
  auto volume = io::Volume::open(store->options_.volume);
  if (!volume.ok()) return volume.error();
  store->volume_ = std::move(volume).value();
  auto found = newest_manifest(*store->volume_);
  if (!found.ok()) return found.error();
  store->run_id_ = found->block.run_id;
  store->generation_ = found->block.generation;
  if (io::Error error = store->load_manifest(found->text)) return error;
  return store;
}

std::uint64_t Store::extent_bytes(ExtentKind kind, int index) const {
  if (kind == ExtentKind::activations) return options_.activation_bytes[index];
  return kind == ExtentKind::state ? layout_.chunks()[index].state_bytes : layout_.chunks()[index].word_bytes();
}

std::uint64_t Store::offset(ExtentKind kind, int index, int slot) const {
  const std::uint64_t base = kManifestBase + 2 * manifest_bytes_;
  switch (kind) {
    case ExtentKind::hi:
      return base + slot * hi_bytes_ + hi_offset_[index];
    case ExtentKind::state:
      return base + options_.generations * hi_bytes_ + slot * state_bytes_ + state_offset_[index];
    case ExtentKind::gradient:
      return base + options_.generations * (hi_bytes_ + state_bytes_) + gradient_offset_[index];
    case ExtentKind::activations:
      return activation_offset_[index];
    default:
      return base + options_.generations * (hi_bytes_ + state_bytes_) + gradient_bytes_ + hi_offset_[index];
  }
}

std::uint64_t Store::checksum(ExtentKind kind, int index, std::uint64_t generation,
                              std::span<const std::byte> bytes) const {
  const std::uint64_t extent =
      static_cast<std::uint64_t>(kind) * layout_.chunks().size() + static_cast<std::uint64_t>(index);
  return io::extent_checksum(run_id_, extent, generation, bytes);
}

void Store::read(ExtentKind kind, int index, io::Buffer buffer, io::Callback done) {
  volume_->submit({.op = io::Op::read,
                   .offset = offset(kind, index, record(kind, index).slot),
                   .length = extent_bytes(kind, index),
                   .buffer = std::move(buffer)},
                  std::move(done));
}

io::Result<io::Buffer> Store::fetch(ExtentKind kind, int index) {
  const std::uint64_t bytes = extent_bytes(kind, index);
  io::Buffer buffer = io::allocate_buffer(bytes);
  if (!buffer) return io::Error{.kind = io::ErrorKind::memory, .operation = "fetch", .length = bytes};
  for (bool again : {false, true}) {
    if (io::Error error =
            transfer(*volume_, io::Op::read, offset(kind, index, record(kind, index).slot), buffer, bytes))
      return error;
    const io::Error wrong = verify(kind, index, buffer.bytes().first(bytes));
    if (!wrong) break;
    if (again) return wrong;
    report_second_reading(wrong);
  }
  return buffer;
}

void Store::report_second_reading(const io::Error& wrong) const {
  if (options_.volume.on_notice)
    options_.volume.on_notice({io::Notice::Kind::retried, wrong.message() + "; it is read once more"});
}

void Store::stamp(ExtentKind kind, int index, std::span<const std::byte> bytes) {
  pending_checksum_[static_cast<int>(kind)][index] = checksum(kind, index, generation_ + 1, bytes);
}

void Store::write(ExtentKind kind, int index, io::Buffer buffer, io::Callback done) {
  Record& at = record(kind, index);
  // A slot that the newest durable generation refers to is not written while there is another.
  if (at.written && at.generation <= generation_ && options_.generations == 2 &&
      (kind == ExtentKind::hi || kind == ExtentKind::state))
    at.slot ^= 1;
  at.checksum = pending_checksum_[static_cast<int>(kind)][index];
  at.generation = generation_ + 1;
  at.written = true;
  volume_->submit({.op = io::Op::write,
                   .offset = offset(kind, index, at.slot),
                   .length = extent_bytes(kind, index),
                   .buffer = std::move(buffer)},
                  std::move(done));
}

io::Error Store::verify(ExtentKind kind, int index, std::span<const std::byte> bytes) const {
  const Record& at = record(kind, index);
  if (at.written && checksum(kind, index, at.generation, bytes) == at.checksum) return {};
  std::string whose = "item " + std::to_string(index), path;
  if (kind != ExtentKind::activations) {
    const Chunk& chunk = layout_.chunks()[index];
    whose = "chunk " + std::to_string(chunk.index);
    path = layout_.units()[chunk.unit].name;
  }
  return {.kind = io::ErrorKind::corruption,
          .operation = "verify",
          .path = path,
          .offset = offset(kind, index, at.slot),
          .length = bytes.size(),
          .detail = std::string("the ") + kind_name(kind) + " of " + whose +
                    (at.written ? " is not what was written" : " was never written") +
                    ": the drive or another program changed it"};
}

std::string Store::manifest(const std::string& progress) const {
  json records = json::array();
  for (int kind = 0; kind < 2; ++kind)
    for (const Record& at : records_[kind]) records.push_back({at.written, at.slot, at.generation, at.checksum});
  json units = json::array();
  for (const UnitShape& unit : layout_.units()) {
    json groups = json::array();
    for (const GroupShape& group : unit.groups)
      groups.push_back({{"elements", group.elements}, {"precision", group.precision}});
    units.push_back({{"name", unit.name}, {"groups", groups}});
  }
  return json{{"version", kVersion},
              {"chunk_elements", layout_.chunk_elements()},
              {"generations", options_.generations},
              {"staged_gradients", options_.staged_gradients},
              {"gradient_chunks", options_.gradient_chunks},
              {"activation_bytes",
               std::accumulate(options_.activation_bytes.begin(), options_.activation_bytes.end(), std::uint64_t{0})},
              {"units", units},
              {"identity", options_.identity},
              {"progress", progress},
              {"records", records}}
      .dump();
}

io::Error Store::load_manifest(const std::string& text) {
  const json manifest = json::parse(text, nullptr, false);
  const std::size_t chunks = layout_.chunks().size();
  if (manifest.is_object() && volume_->size() != total_bytes_ + manifest.value("activation_bytes", std::uint64_t{0}))
    return corrupt("its size is not that of this model and these options");
  if (!manifest.is_object() || !manifest.contains("records") || manifest["records"].size() != 2 * chunks ||
      manifest.value("chunk_elements", std::uint64_t{0}) != layout_.chunk_elements())
    return corrupt("its manifest is of another model or another version");
  for (std::size_t index = 0; index < 2 * chunks; ++index) {
    const json& entry = manifest["records"][index];
    records_[index / chunks][index % chunks] = {
        .checksum = entry[3], .generation = entry[2], .slot = entry[1], .written = entry[0]};
  }
  options_.identity = manifest.value("identity", "");
  progress_ = manifest.value("progress", "");
  return {};
}

io::Error Store::commit(const std::string& progress) {
  const std::string text = manifest(progress);
  if (text.size() > manifest_bytes_)
    return {.kind = io::ErrorKind::io,
            .operation = "commit",
            .length = text.size(),
            .detail = "the manifest outgrew its place"};
  const int copy = static_cast<int>((generation_ + 1) % 2);
  io::Buffer buffer = io::allocate_buffer(round_up(text.size(), kSector));
  if (!buffer) return {.kind = io::ErrorKind::memory, .operation = "commit", .length = text.size()};
  std::memcpy(buffer.data(), text.data(), text.size());
  Superblock block;
  block.run_id = run_id_;
  block.generation = generation_ + 1;
  block.manifest_offset = kManifestBase + copy * manifest_bytes_;
  block.manifest_length = text.size();
  block.manifest_checksum = XXH3_64bits(text.data(), text.size());
  block.checksum = block.own_checksum();
  if (io::Error error = transfer(*volume_, io::Op::write, block.manifest_offset, buffer, buffer.size())) return error;
  if (io::Error error = volume_->flush()) return error;
  std::memset(buffer.data(), 0, kSector);
  std::memcpy(buffer.data(), &block, sizeof block);
  if (io::Error error = transfer(*volume_, io::Op::write, copy * kSuperblockSpacing, buffer, kSector)) return error;
  if (io::Error error = volume_->flush()) return error;
  ++generation_;
  progress_ = progress;
  return {};
}

}  // namespace tierflow::swap
