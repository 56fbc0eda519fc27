#include "swap/store.h"

#include <cstring>
#include <mutex>
#include <numeric>
#include <random>

#include "io/checksum.h"
#include "swap/generations.h"

namespace tierflow::swap {
namespace {

const char* kind_name(ExtentKind kind) {
  static constexpr const char* kNames[] = {"hi", "state", "gradient", "gradient sum", "activations"};
  return kNames[static_cast<int>(kind)];
}

bool is_committed(ExtentKind kind) {
  return kind == ExtentKind::hi || kind == ExtentKind::state;
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
    state_bytes_ += chunk.state_bytes;
    gradient_offset_.push_back(gradient_bytes_);
    const std::size_t id = gradient_offset_.size() - 1;
    if (chunk.trainable && options_.staged_gradients &&
        (options_.gradient_chunks.empty() || options_.gradient_chunks[id]))
      gradient_bytes_ += chunk.word_bytes();
  }
  manifest_bytes_ = round_up((std::uint64_t{1} << 20) + options_.identity.size() + 160 * chunks.size(), kSector);
  total_bytes_ = kManifestBase + 2 * manifest_bytes_ + options_.generations * (hi_bytes_ + state_bytes_) +
                 gradient_bytes_ + (options_.gradient_sums ? gradient_bytes_ : 0);
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
  store->run_id_ = store->options_.run_id != 0 ? store->options_.run_id : (std::uint64_t{random()} << 32) | random();
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
  auto found = newest_generation(**volume);
  if (!found.ok()) return found.error();
  Manifest& manifest = found->manifest;
  return Contents{.identity = std::move(manifest.identity),
                  .progress = std::move(manifest.progress),
                  .chunk_elements = manifest.chunk_elements,
                  .generations = manifest.generations,
                  .staged_gradients = manifest.staged_gradients,
                  .gradient_chunks = std::move(manifest.gradient_chunks)};
}

io::Result<std::unique_ptr<Store>> Store::open(StoreOptions options, const Layout& layout) {
  options.activation_bytes.clear();
  std::unique_ptr<Store> store(new Store(std::move(options), layout));
  auto volume = io::Volume::open(store->options_.volume);
  if (!volume.ok()) return volume.error();
  store->volume_ = std::move(volume).value();
  auto found = newest_generation(*store->volume_);
  if (!found.ok()) return found.error();
  store->run_id_ = found->block.run_id;
  if (io::Error error = store->take_over(found->block.generation, found->manifest)) return error;
  if (found->passed_over.empty()) return store;
  const std::string generation = "generation " + std::to_string(store->generation_);
  if (const io::Error wrong = store->verify_all())
    return store_damaged("its newest generation cannot be read (" + found->passed_over + "), and " + generation +
                         ", which can, is not whole any more: the run had begun to overwrite it (" + wrong.message() +
                         "). What is left is what was exported before");
  if (store->options_.volume.on_notice)
    store->options_.volume.on_notice({io::Notice::Kind::retried, "the store is opened at " + generation +
                                                                     ", which is whole; " + found->passed_over});
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
      return base + options_.generations * (hi_bytes_ + state_bytes_) + gradient_bytes_ + gradient_offset_[index];
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
  io::Error refused;
  {
    std::lock_guard lock(mutex_);
    refused = refused_;
    if (!refused && is_committed(kind)) ++writes_in_flight_;
  }
  if (refused) return done({.buffer = std::move(buffer), .error = std::move(refused)});
  ExtentRecord& at = record(kind, index);
  // A slot that the newest durable generation refers to is not written while there is another.
  if (at.written && at.generation <= generation_ && options_.generations == 2 && is_committed(kind)) at.slot ^= 1;
  at.checksum = pending_checksum_[static_cast<int>(kind)][index];
  at.generation = generation_ + 1;
  at.written = true;
  if (is_committed(kind))
    done = [this, done = std::move(done)](io::Completion&& completion) {
      {
        std::lock_guard lock(mutex_);
        --writes_in_flight_;
        if (completion.error && !refused_) refused_ = completion.error;
      }
      done(std::move(completion));
    };
  volume_->submit({.op = io::Op::write,
                   .offset = offset(kind, index, at.slot),
                   .length = extent_bytes(kind, index),
                   .buffer = std::move(buffer)},
                  std::move(done));
}

io::Error Store::verify(ExtentKind kind, int index, std::span<const std::byte> bytes) const {
  const ExtentRecord& at = record(kind, index);
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
  Manifest manifest{.chunk_elements = layout_.chunk_elements(),
                    .generations = options_.generations,
                    .staged_gradients = options_.staged_gradients,
                    .gradient_chunks = options_.gradient_chunks,
                    .activation_bytes = std::accumulate(options_.activation_bytes.begin(),
                                                        options_.activation_bytes.end(), std::uint64_t{0}),
                    .identity = options_.identity,
                    .progress = progress};
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) {
    const auto& records = records_[static_cast<int>(kind)];
    manifest.records.insert(manifest.records.end(), records.begin(), records.end());
  }
  return manifest.text(layout_.units());
}

io::Error Store::take_over(std::uint64_t generation, const Manifest& manifest) {
  const std::size_t chunks = layout_.chunks().size();
  if (manifest.records.size() != 2 * chunks || manifest.chunk_elements != layout_.chunk_elements())
    return store_damaged("its manifest is of another model or another version");
  if (manifest.generations != options_.generations || volume_->size() != total_bytes_ + manifest.activation_bytes)
    return store_damaged("its size is not that of this model and these options");
  for (std::size_t index = 0; index < 2 * chunks; ++index) {
    if (manifest.records[index].generation > generation)
      return store_damaged("its manifest names a generation that is newer than itself");
    records_[index / chunks][index % chunks] = manifest.records[index];
  }
  generation_ = generation;
  options_.identity = manifest.identity;
  progress_ = manifest.progress;
  return {};
}

io::Error Store::verify_all() {
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    for (int index = 0; index < static_cast<int>(layout_.chunks().size()); ++index)
      if (record(kind, index).written)
        if (auto bytes = fetch(kind, index); !bytes.ok()) return bytes.error();
  return {};
}

void Store::register_memory(std::shared_ptr<const io::Buffer> slab, std::span<const std::span<std::byte>> pieces) {
  volume_->register_memory(pieces);
  registered_.push_back(std::move(slab));
}

io::Error Store::refuse_from_now_on(io::Error why) {
  std::lock_guard lock(mutex_);
  if (!refused_) refused_ = std::move(why);
  return refused_;
}

io::Error Store::commit(const std::string& progress) {
  {
    std::lock_guard lock(mutex_);
    if (refused_) return refused_;
    if (writes_in_flight_ != 0)
      return {.kind = io::ErrorKind::usage, .operation = "commit", .detail = "writes are still in flight"};
  }
  const std::string text = manifest(progress);
  if (text.size() > manifest_bytes_)
    return {.kind = io::ErrorKind::io,
            .operation = "commit",
            .length = text.size(),
            .detail = "the manifest outgrew its place"};
  Superblock block;
  block.run_id = run_id_;
  block.generation = generation_ + 1;
  block.set_manifest(kManifestBase + copy_of(block.generation) * manifest_bytes_, text);
  // The generation's number, and with it its slots, would be used a second time, while its superblock may be durable.
  if (io::Error error = publish_generation(*volume_, block, text)) return refuse_from_now_on(std::move(error));
  generation_ = block.generation;
  progress_ = progress;
  return {};
}

}  // namespace tierflow::swap
