#pragma once
// Where each extent lives in storage, with a record each: slot, generation, checksum. What outlives the run (weights,
// optimizer state) lies on one volume, what it makes anew in every step (gradients, activations) on another, so that a
// run that goes on with a store may need other scratch. Bytes on the volume: docs/store.md. A generation whose commit
// failed, or one of whose extents could not be written, is never acknowledged: from then on the store takes no writes
// and no commits, so that nothing overwrites what a drive may yet show as committed.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "io/volume.h"
#include "swap/generations.h"
#include "swap/layout.h"
#include "swap/plan.h"
#include "swap/scratch.h"
#include "swap/store_format.h"

namespace tierflow::swap {

// What a generation needs beside the store to count, of which the store knows nothing: called with its number and its
// progress before its extents are read. An error says what is missing or damaged.
using CheckBeside = std::function<io::Error(std::uint64_t generation, const std::string& progress)>;

struct StoreOptions {
  io::VolumeOptions volume;  // bytes is computed
  int generations = 1;       // 2: a commit leaves the generation before it intact until the next one is durable
  ScratchOptions scratch;
  std::string identity;  // JSON of the client's: what the state belongs to; kept in the manifest and given back on open
  CheckBeside check_beside;  // empty: nothing
  // resume() and restore(): where the newest generation cannot be read, as where it is damaged, the one before it.
  bool go_back = false;
  // A reading of what is gone on with that fails is made once more after so long: a drive that was reset is back then.
  std::chrono::milliseconds second_look{5000};
  std::uint64_t run_id = 0;  // 0: drawn; for tests that compare what is written
};

class Store {
 public:
  static io::Result<std::unique_ptr<Store>> create(StoreOptions options, const Layout& layout);
  // Opens the newest valid generation, for reading: without scratch. The layout must be the one it was created with. If
  // a newer one may have been committed and cannot be read, the generation before it is read and verified whole. It is
  // refused if the run had begun to overwrite it.
  static io::Result<std::unique_ptr<Store>> open(StoreOptions options, const Layout& layout);
  // Opens a store of two generations to go on with it. Nothing is written to it until restore() has succeeded. An error
  // of kind io where superblocks or manifests cannot be read, so that it is not known which generation is the newest.
  static io::Result<std::unique_ptr<Store>> resume(StoreOptions options, const Layout& layout);
  using RestoredExtent = std::function<void(ExtentKind, int chunk, std::span<const std::byte>)>;
  using RestoreProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;  // bytes
  // After resume(), once: reads and verifies all of the newest generation and makes sure that it is durable. If it is
  // damaged, or what lies beside it, the one before it, if that is whole: what the run writes next takes the newer one
  // away. So a drive that fails or does not answer is an error of kind io, unless StoreOptions::go_back says otherwise.
  // Hands each extent to `use`, again from the first where it goes back a generation. No error: identity(), progress()
  // and what comes are of the generation that counts from here on.
  io::Error restore(const RestoredExtent& use, const RestoreProgress& progress);

  // Of a store that was opened: reads and verifies all of its generation. The error names what is damaged, the
  // generation, and whether the one before it is whole, so that restore() would go back to it.
  io::Error verify_all(const RestoreProgress& progress);

  // Reads what create() was given as identity and commit() as progress, of the newest valid generation: enough to build
  // the layout that open() and resume() need. generation 0: nothing was ever committed.
  struct Contents {
    std::uint64_t generation = 0;
    std::string identity, progress;
    std::uint64_t chunk_elements = 0;
    int generations = 1;
    std::string passed_over;  // why a newer one may have been committed, which cannot be read; empty: none was
    io::Error unreadable;     // where that is for a reading that failed
  };
  static io::Result<Contents> inspect(io::VolumeOptions volume);
  // Bytes that create() will take in storage, scratch included.
  static std::uint64_t bytes_needed(const StoreOptions& options, const Layout& layout);

  // An extent is a chunk's, or of activations an item's. Any thread; no two calls for one extent at a time.
  void read(ExtentKind kind, int index, io::Buffer buffer, io::Callback done);
  // Writes the extent into the generation at work. stamp() of the same bytes comes first. A store may refuse: it takes
  // no more writes, or the extent is frozen words, which have one slot, and a commit of two generations covers them.
  // Then `done` gets the reason before this call returns.
  void write(ExtentKind kind, int index, io::Buffer buffer, io::Callback done);
  // Reads an extent into memory of its own, verified, a second time where the first does not match. Blocks.
  io::Result<io::Buffer> fetch(ExtentKind kind, int index);
  // Hashes what the next write() of the extent records: call where the bytes are produced. A commit may lie between.
  void stamp(ExtentKind kind, int index, std::span<const std::byte> bytes);
  // Compares bytes that read() brought with the record: an error of kind corruption names the extent.
  io::Error verify(ExtentKind kind, int index, std::span<const std::byte> bytes) const;

  // Tells the user that an extent is read once more: what verify() found may have gone wrong on the way from the drive.
  void report_second_reading(const io::Error& wrong) const;

  // Makes everything written so far the newest generation, durably. `progress` is the client's JSON (step, data
  // position ...). Error of kind usage while a write that a commit covers is in flight, or while a CommittedWords
  // lives. Reads may be in flight. After an error of the drive the store takes no more writes and no more commits.
  io::Error commit(const std::string& progress);

  // Every extent that a commit covers is again what the newest durable generation has: what was written since is
  // forgotten, and its slots are written next. Error of kind usage while such a write is in flight, or where no
  // generation of two is durable. Reads may not be in flight.
  io::Error go_back();

  // Requests within one of these pieces of the slab are faster. The slab then lives as long as the volume, which may
  // look for buffers in it until its end.
  void register_memory(std::shared_ptr<const io::Buffer> slab, std::span<const std::span<std::byte>> pieces);

  // Whether the extent was ever written.
  bool holds(ExtentKind kind, int index) const { return record(kind, index).written; }
  std::uint64_t extent_bytes(ExtentKind kind, int index) const;
  const std::string& identity() const { return options_.identity; }
  const std::string& progress() const { return progress_; }
  // The newest durable one. Any thread.
  std::uint64_t generation() const { return generation_; }
  // Of all its files, on the drives.
  std::uint64_t storage_bytes() const;
  io::VolumeMode mode() const { return volume_->mode(); }
  std::vector<io::DriveStats> drives() const;  // scratch included
  // As Volume::remove_files().
  void remove_files();

 private:
  friend class CommittedWords;
  Store(StoreOptions options, const Layout& layout);
  ExtentRecord& record(ExtentKind kind, int index) { return records_[static_cast<int>(kind)][index]; }
  const ExtentRecord& record(ExtentKind kind, int index) const { return records_[static_cast<int>(kind)][index]; }
  io::Volume& volume_of(ExtentKind kind) { return is_scratch(kind) ? *scratch_volume_ : *volume_; }
  std::uint64_t offset(ExtentKind kind, int index, int slot) const;
  std::uint64_t checksum(ExtentKind kind, int index, std::uint64_t generation, std::uint64_t content) const;
  std::string manifest(const std::string& progress) const;
  // Frozen words of a generation that is durable.
  bool is_committed_for_good(ExtentKind kind, int index) const;
  void read(ExtentKind kind, int index, const ExtentRecord& at, io::Buffer buffer, io::Callback done);
  io::Error verify(ExtentKind kind, int index, const ExtentRecord& at, std::span<const std::byte> bytes) const;
  io::Result<io::Buffer> fetch(ExtentKind kind, int index, const ExtentRecord& at);
  io::Error make_scratch();
  io::Error take_over(const Generation& found);
  io::Error scrub(const RestoredExtent& use, const RestoreProgress& progress);
  void wait_for_second_look(const std::string& why) const;
  void notify(std::string text) const;
  // Makes `why` what every later write and commit returns; the first one stays.
  io::Error refuse_from_now_on(io::Error why);

  StoreOptions options_;
  const Layout& layout_;
  std::vector<ExtentRecord> records_[kExtentKinds];
  std::vector<ExtentRecord> committed_words_, committed_state_;  // of the newest durable generation
  int readers_ = 0;                                              // of these
  std::vector<std::uint64_t> stamped_[kExtentKinds];             // content hashes
  std::vector<std::uint64_t> hi_offset_, state_offset_;          // by chunk, within a slot
  std::vector<std::uint64_t> second_hi_offset_;  // within the second slot, where frozen chunks have none
  ScratchPlaces scratch_;
  std::uint64_t manifest_bytes_ = 0, hi_bytes_ = 0, second_hi_bytes_ = 0, state_bytes_ = 0, total_bytes_ = 0;
  std::uint64_t run_id_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;  // newest durable one; work goes on in generation_ + 1
  std::string progress_;
  std::vector<Generation> found_;  // of resume() until restore(), and of open()
  std::mutex mutex_;
  io::Error refused_;                   // why nothing is written any more
  std::uint64_t writes_in_flight_ = 0;  // of extents that a commit covers
  std::vector<std::shared_ptr<const io::Buffer>> registered_;
  std::unique_ptr<io::Volume> volume_, scratch_volume_;  // last: they wait for what is in flight before the rest goes
};

// The hi words of a store's newest durable generation, which stays that while this lives: Store::commit() is refused,
// and what is written meanwhile goes to other slots. The store has two generations, or is open for reading, and
// outlives this. Any thread.
class CommittedWords {
 public:
  explicit CommittedWords(Store& store);
  ~CommittedWords();
  CommittedWords(const CommittedWords&) = delete;
  CommittedWords& operator=(const CommittedWords&) = delete;

  std::uint64_t bytes(int chunk) const { return store_.extent_bytes(ExtentKind::hi, chunk); }
  // As those of the store.
  void read(int chunk, io::Buffer buffer, io::Callback done);
  io::Error verify(int chunk, std::span<const std::byte> bytes) const;
  io::Result<io::Buffer> fetch(int chunk);
  void report_second_reading(const io::Error& wrong) const { store_.report_second_reading(wrong); }

 private:
  Store& store_;
};

}  // namespace tierflow::swap
