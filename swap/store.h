#pragma once
// Where each extent lives on the volume, with a record each: slot, generation, checksum. Bytes on the volume:
// docs/store.md. A generation whose commit failed, or one of whose extents could not be written, is never acknowledged:
// from then on the store takes no writes and no commits, so that nothing overwrites what a drive may yet show as
// committed.
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "io/volume.h"
#include "swap/layout.h"
#include "swap/plan.h"
#include "swap/store_format.h"

namespace tierflow::swap {

struct StoreOptions {
  io::VolumeOptions volume;  // bytes is computed
  int generations = 1;       // 2: a commit leaves the generation before it intact until the next one is durable
  bool staged_gradients = true;
  std::vector<bool> gradient_chunks;  // by chunk: whose gradient there is room for; empty: all, where any are staged
  bool gradient_sums = false;         // room for their low words too
  std::vector<std::uint64_t> activation_bytes;  // of each extent of activations, multiples of kSector; 0: not stored
  std::string identity;  // JSON of the client's: what the state belongs to; kept in the manifest and given back on open
  std::uint64_t run_id = 0;  // 0: drawn; for tests that compare what is written
};

class Store {
 public:
  static io::Result<std::unique_ptr<Store>> create(StoreOptions options, const Layout& layout);
  // Opens the newest valid generation, for reading: without activations. The layout must be the one it was created
  // with. If a newer one may have been committed and cannot be read, the generation before it is read and verified
  // whole. It is refused if the run had begun to overwrite it.
  static io::Result<std::unique_ptr<Store>> open(StoreOptions options, const Layout& layout);
  // What create() was given as identity and commit() as progress, of the newest valid generation: enough to build the
  // layout that open() needs.
  struct Contents {
    std::string identity, progress;
    std::uint64_t chunk_elements = 0;
    int generations = 1;
    bool staged_gradients = false;
    std::vector<bool> gradient_chunks;
  };
  static io::Result<Contents> inspect(const io::VolumeOptions& volume);
  // Bytes that create() will take on the volume.
  static std::uint64_t bytes_needed(const StoreOptions& options, const Layout& layout);

  // An extent is a chunk's, or of activations an item's. Any thread; no two calls for one extent at a time.
  void read(ExtentKind kind, int index, io::Buffer buffer, io::Callback done);
  // Writes the extent into the generation at work. stamp() of the same bytes comes first. If the store takes no more
  // writes, `done` gets the reason before this call returns.
  void write(ExtentKind kind, int index, io::Buffer buffer, io::Callback done);
  // Reads an extent into memory of its own, verified, a second time where the first does not match. Blocks.
  io::Result<io::Buffer> fetch(ExtentKind kind, int index);
  // Makes the checksum that the next write() of the extent records: call where the bytes are produced.
  void stamp(ExtentKind kind, int index, std::span<const std::byte> bytes);
  // Compares bytes that read() brought with the record: an error of kind corruption names the extent.
  io::Error verify(ExtentKind kind, int index, std::span<const std::byte> bytes) const;

  // Tells the user that an extent is read once more: what verify() found may have gone wrong on the way from the drive.
  void report_second_reading(const io::Error& wrong) const;

  // Makes everything written so far the newest generation, durably. `progress` is the client's JSON (step, data
  // position ...). No read or write may be in flight. After an error of the drive the store takes nothing more.
  io::Error commit(const std::string& progress);

  // Requests within one of these pieces of the slab are faster. The slab then lives as long as the volume, which may
  // look for buffers in it until its end.
  void register_memory(std::shared_ptr<const io::Buffer> slab, std::span<const std::span<std::byte>> pieces);

  std::uint64_t extent_bytes(ExtentKind kind, int index) const;
  const std::string& identity() const { return options_.identity; }
  const std::string& progress() const { return progress_; }
  std::uint64_t generation() const { return generation_; }
  io::Volume& volume() { return *volume_; }

 private:
  Store(StoreOptions options, const Layout& layout);
  ExtentRecord& record(ExtentKind kind, int index) { return records_[static_cast<int>(kind)][index]; }
  const ExtentRecord& record(ExtentKind kind, int index) const { return records_[static_cast<int>(kind)][index]; }
  std::uint64_t offset(ExtentKind kind, int index, int slot) const;
  std::uint64_t checksum(ExtentKind kind, int index, std::uint64_t generation, std::span<const std::byte> bytes) const;
  std::string manifest(const std::string& progress) const;
  io::Error take_over(std::uint64_t generation, const Manifest& manifest);
  io::Error verify_all();
  // Makes `why` what every later write and commit returns; the first one stays.
  io::Error refuse_from_now_on(io::Error why);

  StoreOptions options_;
  const Layout& layout_;
  std::vector<ExtentRecord> records_[kExtentKinds];
  std::vector<std::uint64_t> pending_checksum_[kExtentKinds];
  std::vector<std::uint64_t> hi_offset_, state_offset_;  // by chunk, within a slot
  std::vector<std::uint64_t> gradient_offset_;           // by chunk, from the first
  std::vector<std::uint64_t> activation_offset_;
  std::uint64_t manifest_bytes_ = 0, hi_bytes_ = 0, state_bytes_ = 0, gradient_bytes_ = 0, total_bytes_ = 0;
  std::uint64_t run_id_ = 0;
  std::uint64_t generation_ = 0;  // newest durable one; work goes on in generation_ + 1
  std::string progress_;
  std::mutex mutex_;
  io::Error refused_;                   // why nothing is written any more
  std::uint64_t writes_in_flight_ = 0;  // of extents that a commit covers
  std::vector<std::shared_ptr<const io::Buffer>> registered_;
  std::unique_ptr<io::Volume> volume_;  // last: waits for what is in flight before the rest goes
};

}  // namespace tierflow::swap
