#pragma once
// Keys and values on storage, for layers that have no room in RAM. A piece is those of one sequence in one layer. It is
// read into a buffer in RAM before the computation, and what changed is written back.
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/buffer.h"
#include "io/volume.h"
#include "runtime/spec/cache_shape.h"

namespace tierflow {

// What moved since a store was made, and how long the computation waited for it.
struct CacheTraffic {
  std::uint64_t read = 0, written = 0;  // bytes
  double waited = 0;                    // seconds
};

// For one thread. The volume's callbacks run on the volume's own.
class KeyValueStore {
 public:
  // Bytes [begin, end) of every slab of a piece, multiples of kSlabAlignment.
  struct Part {
    std::uint64_t begin = 0, end = 0;
  };
  struct Visit {
    int stage = 0;
    std::int64_t sequence = 0;
    Part part;  // the part that the computation uses
  };

  // volume: of placement.storage bytes or more, empty.
  KeyValueStore(std::unique_ptr<io::Volume> volume, const CacheShape& shape, const CachePlacement& placement);
  ~KeyValueStore();  // waits for what is in flight

  bool stores(int stage) const { return placement_.stored[static_cast<std::size_t>(stage)]; }
  std::uint64_t of_slab(int stage) const { return shape_.of_slab[static_cast<std::size_t>(stage)]; }
  // How many pieces may be taken at once, while others are read or written.
  std::size_t most_taken() const { return static_cast<std::size_t>(placement_.buffers) / 2; }

  // Waits for what is in flight, and forgets what the buffers hold.
  void clear();
  // The order in which pieces will be taken: they are read ahead as far as there are buffers. Another order only costs
  // time.
  void expect(std::vector<Visit> order);
  // The piece in RAM, at least `part` of it read; what else it holds is undefined. It stays until put_back(). Throws
  // Exception (kind io) where a drive failed, also at what was written before.
  std::byte* take(const Visit& visit);
  // Writes the part of it that changed.
  void put_back(int stage, std::int64_t sequence, Part changed);

  CacheTraffic traffic() const;

 private:
  using Key = std::pair<int, std::int64_t>;
  struct Held {
    std::size_t buffer = 0;
    int in_flight = 0;  // requests
    bool taken = false;
    bool expected = false;  // came ahead
  };

  void move(io::Op op, const Key& key, Part part);
  void arrived(const Key& key, io::Completion&& done);
  void let_go(const Key& key);  // where nothing needs it any more; the mutex is held
  void fetch_ahead();
  std::size_t free_buffer(std::unique_lock<std::mutex>& lock);
  void wait_for(std::unique_lock<std::mutex>& lock, const Key& key);

  const CacheShape shape_;
  const CachePlacement placement_;
  std::vector<std::uint64_t> begins_;  // by stage: of its pieces on the volume
  std::shared_ptr<const io::Buffer> memory_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Held> held_;
  std::vector<std::size_t> free_;
  io::Error failed_;  // the first
  CacheTraffic traffic_;
  // The compute thread's alone.
  std::vector<Visit> order_;
  std::size_t next_taken_ = 0, next_fetched_ = 0;
  std::unique_ptr<io::Volume> volume_;  // last: its destructor waits for requests, whose callbacks use the others
};

}  // namespace tierflow
