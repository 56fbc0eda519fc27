#pragma once
// Where each extent lives in storage, and a record for each: slot, generation, checksum. What outlives the run
// (weights, optimizer state) lies on one volume. What a run makes anew in every step (gradients, activations) lies on
// another, the scratch volume, so that a resumed run may need other scratch. docs/store.md describes the bytes on the
// volume.
// A generation is never acknowledged if its commit failed or one of its extents could not be written. From then on the
// store takes no writes and no commits, so that nothing overwrites what a drive may still show as committed.
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

// Checks what belongs to a generation but lies beside the store, which knows nothing of it. It is called with the
// generation's number and progress before its extents are read. An error says what is missing or damaged; the
// generation then counts as damaged.
using CheckBeside = std::function<io::Error(std::uint64_t generation, const std::string& progress)>;

struct StoreOptions {
  io::VolumeOptions volume;  // bytes is computed
  int generations = 1;       // 2: a commit leaves the generation before it intact until the next one is durable
  ScratchOptions scratch;
  std::string
      identity;  // the client's JSON about what the state belongs to; kept in the manifest and given back on open
  CheckBeside check_beside;  // empty: nothing lies beside the store
  // resume() and restore(): use the generation before if the newest cannot be read, as if it were damaged.
  bool go_back = false;
  // resume() and restore(): a read that fails is made once more after this time, because a drive that was reset is back
  // by then.
  std::chrono::milliseconds read_retry_delay{5000};
  std::uint64_t run_id = 0;  // 0: drawn; for tests that compare what is written
};

class Store {
 public:
  static io::Result<std::unique_ptr<Store>> create(StoreOptions options, const Layout& layout);
  // Opens the newest valid generation for reading, without scratch. The layout must be the one that the store was
  // created with. If a newer generation may have been committed and cannot be read, the generation before it is read
  // and verified whole. It is refused if the run had begun to overwrite it.
  static io::Result<std::unique_ptr<Store>> open(StoreOptions options, const Layout& layout);
  // Opens a store of two generations, so that a run can resume from it. Nothing is written to it until restore() has
  // succeeded. An error of kind io if superblocks or manifests cannot be read, because then it is not known which
  // generation is the newest.
  static io::Result<std::unique_ptr<Store>> resume(StoreOptions options, const Layout& layout);
  using RestoredExtent = std::function<void(ExtentKind, int chunk, std::span<const std::byte>)>;
  using RestoreProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;  // bytes
  // After resume(), once: reads and verifies all of the newest generation and makes sure that it is durable. If the
  // generation or what lies beside it is damaged, does the same with the generation before. The run's next writes then
  // destroy the newer one; so a drive that fails or does not answer is an error of kind io, unless
  // StoreOptions::go_back is set.
  // Hands each extent to `use`, and begins again with the first extent if it goes back a generation. After success,
  // identity(), progress() and what was handed over are of the generation that counts from here on.
  io::Error restore(const RestoredExtent& use, const RestoreProgress& progress);

  // After open(): reads and verifies all of the opened generation. The error names what is damaged, the generation, and
  // whether the generation before is whole, so that restore() would go back to it.
  io::Error verify_all(const RestoreProgress& progress);

  // Reads the identity and the progress of the newest valid generation: enough to build the layout that open() and
  // resume() need. generation 0: nothing was ever committed.
  struct Contents {
    std::uint64_t generation = 0;
    std::string identity, progress;
    std::uint64_t chunk_elements = 0;
    int generations = 1;
    std::string
        passed_over;       // why a newer generation may have been committed that cannot be read; empty: there is none
    io::Error unreadable;  // set if passed_over is because of a read that failed
    bool damaged = false;  // passed_over is because of what cannot be read; else a crash explains it too
  };
  static io::Result<Contents> inspect(io::VolumeOptions volume);
  // Bytes that create() will take in storage, scratch included.
  static std::uint64_t bytes_needed(const StoreOptions& options, const Layout& layout);

  // `index` is a chunk, or for activations an item. Any thread, but no two calls for one extent at a time.
  void read(ExtentKind kind, int index, io::Buffer buffer, io::Callback done);
  // Writes the extent into the generation that is being written. Call stamp() with the same bytes first. The store
  // refuses if it takes no more writes, or if the extent is frozen words (which have one slot) that a commit of a store
  // of two generations covers. Then `done` gets the reason before this call returns.
  void write(ExtentKind kind, int index, io::Buffer buffer, io::Callback done);
  // Reads an extent into new memory and verifies it. If it does not match, reads it a second time. Blocks.
  io::Result<io::Buffer> fetch(ExtentKind kind, int index);
  // Computes the hash that the next write() of the extent will record. Call it where the bytes are produced. A commit
  // may come between stamp() and write().
  void stamp(ExtentKind kind, int index, std::span<const std::byte> bytes);
  // Compares bytes that read() brought with the record; an error of kind corruption names the extent.
  io::Error verify(ExtentKind kind, int index, std::span<const std::byte> bytes) const;

  // Tells the user that an extent is read once more, because the bytes may have changed on the way from the drive.
  void report_second_reading(const io::Error& wrong) const;

  // Makes everything written so far the newest generation, durably. `progress` is the client's JSON (step, data
  // position ...). Error of kind usage while a write that a commit covers is in flight, or while a CommittedWords
  // lives. Reads may be in flight. After an error of the drive the store takes no more writes and no more commits.
  io::Error commit(const std::string& progress);

  // Returns to the newest durable generation: forgets what was written since to extents that a commit covers, and
  // writes next to those slots. Error of kind usage while such a write is in flight, or if the store has one generation
  // or none is durable. No read may be in flight.
  io::Error go_back();

  // Makes requests within one of these pieces of the slab faster. The slab then lives as long as the volume, which may
  // look for buffers in it until its end.
  void register_memory(std::shared_ptr<const io::Buffer> slab, std::span<const std::span<std::byte>> pieces);

  // Whether the extent was ever written.
  bool holds(ExtentKind kind, int index) const { return record(kind, index).written; }
  std::uint64_t extent_bytes(ExtentKind kind, int index) const;
  const std::string& identity() const { return options_.identity; }
  const std::string& progress() const { return progress_; }
  // The number of the newest durable generation. Any thread.
  std::uint64_t generation() const { return generation_; }
  // Bytes of all its files on the drives.
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
  void wait_before_reading_again(const std::string& why) const;
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

// Reads the hi words of a store's newest durable generation. As long as this lives, that generation stays the newest:
// Store::commit() is refused, and writes go to other slots. The store has two generations, or is open for reading, and
// outlives this. Any thread.
class CommittedWords {
 public:
  explicit CommittedWords(Store& store);
  ~CommittedWords();
  CommittedWords(const CommittedWords&) = delete;
  CommittedWords& operator=(const CommittedWords&) = delete;

  std::uint64_t bytes(int chunk) const { return store_.extent_bytes(ExtentKind::hi, chunk); }
  // As the functions of Store with the same names.
  void read(int chunk, io::Buffer buffer, io::Callback done);
  io::Error verify(int chunk, std::span<const std::byte> bytes) const;
  io::Result<io::Buffer> fetch(int chunk);
  void report_second_reading(const io::Error& wrong) const { store_.report_second_reading(wrong); }

 private:
  Store& store_;
};

}  // namespace tierflow::swap
