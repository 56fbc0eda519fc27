#include "swap/store.h"

#include <cstring>
#include <mutex>
#include <random>

#include "io/checksum.h"
#include "io/discard.h"

namespace tierflow::swap {
namespace {

const char* kind_name(ExtentKind kind) {
  static constexpr const char* kNames[] = {"hi", "state", "gradient", "gradient sum", "activations"};
  return kNames[static_cast<int>(kind)];
}

}  // namespace

Store::Store(StoreOptions options, const Layout& layout)
    : options_(std::move(options)), layout_(layout), scratch_(options_.scratch, layout) {
  const auto& chunks = layout.chunks();
  for (int kind = 0; kind < kExtentKinds; ++kind) {
    const std::size_t extents = static_cast<ExtentKind>(kind) == ExtentKind::activations
                                    ? options_.scratch.activation_bytes.size()
                                    : chunks.size();
    records_[kind].resize(extents);
    stamped_[kind].resize(extents);
  }
  for (const Chunk& chunk : chunks) {
    hi_offset_.push_back(hi_bytes_);
    hi_bytes_ += chunk.word_bytes();
    second_hi_offset_.push_back(second_hi_bytes_);
    if (chunk.changes() && options_.generations == 2) second_hi_bytes_ += chunk.word_bytes();
    state_offset_.push_back(state_bytes_);
    state_bytes_ += chunk.state_bytes;
  }
  manifest_bytes_ = round_up((std::uint64_t{1} << 20) + options_.identity.size() + 160 * chunks.size(), kSector);
  total_bytes_ =
      kManifestBase + 2 * manifest_bytes_ + hi_bytes_ + second_hi_bytes_ + options_.generations * state_bytes_;
}

std::uint64_t Store::bytes_needed(const StoreOptions& options, const Layout& layout) {
  const Store store(options, layout);
  return store.total_bytes_ + store.scratch_.bytes();
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
  if (io::Error error = store->make_scratch()) {
    store->volume_->remove_files();
    return error;
  }
  return store;
}

// Its files have no name from the beginning: nothing is left of a process that is killed.
io::Error Store::make_scratch() {
  if (scratch_.bytes() == 0) return {};
  io::VolumeOptions options = options_.volume;
  options.name += "-scratch";
  options.bytes = scratch_.bytes();
  options.speeds = volume_->speeds();
  options.folders.clear();
  for (const io::DriveStats& drive : volume_->stats()) options.folders.push_back(drive.directory);
  if (io::Error error = io::discard(options)) return error;
  auto volume = io::Volume::create(options);
  if (!volume.ok()) return volume.error();
  scratch_volume_ = std::move(volume).value();
  scratch_volume_->remove_files();
  return {};
}

std::uint64_t Store::extent_bytes(ExtentKind kind, int index) const {
  if (kind == ExtentKind::activations) return options_.scratch.activation_bytes[index];
  return kind == ExtentKind::state ? layout_.chunks()[index].state_bytes : layout_.chunks()[index].word_bytes();
}

bool Store::is_committed_for_good(ExtentKind kind, int index) const {
  if (kind != ExtentKind::hi || options_.generations != 2 || layout_.chunks()[index].changes()) return false;
  const ExtentRecord& at = record(kind, index);
  return at.written && at.generation <= generation_;
}

std::uint64_t Store::offset(ExtentKind kind, int index, int slot) const {
  if (is_scratch(kind)) return scratch_.offset(kind, index);
  const std::uint64_t base = kManifestBase + 2 * manifest_bytes_;
  if (kind == ExtentKind::hi) return base + (slot == 0 ? hi_offset_[index] : hi_bytes_ + second_hi_offset_[index]);
  return base + hi_bytes_ + second_hi_bytes_ + slot * state_bytes_ + state_offset_[index];
}

std::uint64_t Store::checksum(ExtentKind kind, int index, std::uint64_t generation, std::uint64_t content) const {
  const std::uint64_t extent =
      static_cast<std::uint64_t>(kind) * layout_.chunks().size() + static_cast<std::uint64_t>(index);
  return io::extent_checksum(run_id_, extent, generation, extent_bytes(kind, index), content);
}

void Store::read(ExtentKind kind, int index, io::Buffer buffer, io::Callback done) {
  read(kind, index, record(kind, index), std::move(buffer), std::move(done));
}

void Store::read(ExtentKind kind, int index, const ExtentRecord& at, io::Buffer buffer, io::Callback done) {
  volume_of(kind).submit({.op = io::Op::read,
                          .offset = offset(kind, index, at.slot),
                          .length = extent_bytes(kind, index),
                          .buffer = std::move(buffer)},
                         std::move(done));
}

io::Result<io::Buffer> Store::fetch(ExtentKind kind, int index) {
  return fetch(kind, index, record(kind, index));
}

io::Result<io::Buffer> Store::fetch(ExtentKind kind, int index, const ExtentRecord& at) {
  const std::uint64_t bytes = extent_bytes(kind, index);
  io::Buffer buffer = io::allocate_buffer(bytes);
  if (!buffer) return io::Error{.kind = io::ErrorKind::memory, .operation = "fetch", .length = bytes};
  for (bool again : {false, true}) {
    if (io::Error error = transfer(volume_of(kind), io::Op::read, offset(kind, index, at.slot), buffer, bytes))
      return error;
    const io::Error wrong = verify(kind, index, at, buffer.bytes().first(bytes));
    if (!wrong) break;
    if (again) return wrong;
    report_second_reading(wrong);
  }
  return buffer;
}

void Store::report_second_reading(const io::Error& wrong) const {
  notify(wrong.message() + "; it is read once more");
}

void Store::stamp(ExtentKind kind, int index, std::span<const std::byte> bytes) {
  stamped_[static_cast<int>(kind)][index] = io::content_hash(bytes);
}

void Store::write(ExtentKind kind, int index, io::Buffer buffer, io::Callback done) {
  io::Error refused;
  {
    std::lock_guard lock(mutex_);
    refused = refused_;
    if (!refused && is_committed_for_good(kind, index))
      refused = {.kind = io::ErrorKind::usage,
                 .operation = "write",
                 .path = layout_.units()[layout_.chunks()[index].unit].name,
                 .detail = "frozen words that are committed have no second slot: they are not written again"};
    if (!refused && !is_scratch(kind)) ++writes_in_flight_;
  }
  if (refused) return done({.buffer = std::move(buffer), .error = std::move(refused)});
  ExtentRecord& at = record(kind, index);
  // A slot that the newest durable generation refers to is not written while there is another. Scratch has neither.
  const std::uint64_t generation = is_scratch(kind) ? 0 : generation_ + 1;
  if (at.written && at.generation < generation && options_.generations == 2) at.slot ^= 1;
  at.checksum = checksum(kind, index, generation, stamped_[static_cast<int>(kind)][index]);
  at.generation = generation;
  at.written = true;
  if (!is_scratch(kind))
    done = [this, done = std::move(done)](io::Completion&& completion) {
      {
        std::lock_guard lock(mutex_);
        --writes_in_flight_;
        if (completion.error && !refused_) refused_ = completion.error;
      }
      done(std::move(completion));
    };
  volume_of(kind).submit({.op = io::Op::write,
                          .offset = offset(kind, index, at.slot),
                          .length = extent_bytes(kind, index),
                          .buffer = std::move(buffer)},
                         std::move(done));
}

io::Error Store::verify(ExtentKind kind, int index, std::span<const std::byte> bytes) const {
  return verify(kind, index, record(kind, index), bytes);
}

io::Error Store::verify(ExtentKind kind, int index, const ExtentRecord& at, std::span<const std::byte> bytes) const {
  if (at.written && checksum(kind, index, at.generation, io::content_hash(bytes)) == at.checksum) return {};
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
                    .identity = options_.identity,
                    .progress = progress};
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state}) {
    const auto& records = records_[static_cast<int>(kind)];
    manifest.records.insert(manifest.records.end(), records.begin(), records.end());
  }
  return manifest.text(layout_.units());
}

void Store::register_memory(std::shared_ptr<const io::Buffer> slab, std::span<const std::span<std::byte>> pieces) {
  volume_->register_memory(pieces);
  if (scratch_volume_ != nullptr) scratch_volume_->register_memory(pieces);
  registered_.push_back(std::move(slab));
}

std::uint64_t Store::storage_bytes() const {
  return volume_->size() + (scratch_volume_ == nullptr ? 0 : scratch_volume_->size());
}

std::vector<io::DriveStats> Store::drives() const {
  std::vector<io::DriveStats> drives = volume_->stats();
  if (scratch_volume_ == nullptr) return drives;
  const std::vector<io::DriveStats> more = scratch_volume_->stats();
  for (std::size_t i = 0; i < drives.size(); ++i) drives[i].add(more[i]);
  return drives;
}

void Store::remove_files() {
  volume_->remove_files();
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
    if (readers_ != 0)
      return {.kind = io::ErrorKind::usage,
              .operation = "commit",
              .detail = "the generation before is still being read: what is written next would overwrite it"};
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
  {
    std::lock_guard lock(mutex_);
    committed_words_ = records_[static_cast<int>(ExtentKind::hi)];
    committed_state_ = records_[static_cast<int>(ExtentKind::state)];
  }
  progress_ = progress;
  generation_ = block.generation;
  return {};
}

io::Error Store::go_back() {
  std::lock_guard lock(mutex_);
  if (refused_) return refused_;
  if (writes_in_flight_ != 0 || options_.generations != 2 || generation_ == 0)
    return {.kind = io::ErrorKind::usage,
            .operation = "go back",
            .detail = writes_in_flight_ != 0 ? "writes are still in flight" : "there is no generation to go back to"};
  records_[static_cast<int>(ExtentKind::hi)] = committed_words_;
  records_[static_cast<int>(ExtentKind::state)] = committed_state_;
  return {};
}

CommittedWords::CommittedWords(Store& store) : store_(store) {
  std::lock_guard lock(store_.mutex_);
  ++store_.readers_;
}

CommittedWords::~CommittedWords() {
  std::lock_guard lock(store_.mutex_);
  --store_.readers_;
}

void CommittedWords::read(int chunk, io::Buffer buffer, io::Callback done) {
  store_.read(ExtentKind::hi, chunk, store_.committed_words_[chunk], std::move(buffer), std::move(done));
}

io::Error CommittedWords::verify(int chunk, std::span<const std::byte> bytes) const {
  return store_.verify(ExtentKind::hi, chunk, store_.committed_words_[chunk], bytes);
}

io::Result<io::Buffer> CommittedWords::fetch(int chunk) {
  return store_.fetch(ExtentKind::hi, chunk, store_.committed_words_[chunk]);
}

}  // namespace tierflow::swap
