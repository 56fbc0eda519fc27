// How a store that another run left is found, opened, verified and gone on with.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "swap/generations.h"
#include "swap/store.h"

namespace tierflow::swap {
namespace {

constexpr std::uint64_t kScrubBytes = std::uint64_t{64} << 20;  // read ahead, where more than one extent fits into it

std::string name_of(std::uint64_t generation) {
  return "generation " + std::to_string(generation);
}

bool failed_at_the_drive(const io::Result<std::vector<Generation>>& found) {
  const auto failed = [](const io::Error& error) { return error && error.kind == io::ErrorKind::io; };
  return found.ok() ? !found.value().empty() && failed(found.value().front().unreadable) : failed(found.error());
}

io::Error nothing_committed() {
  return store_damaged("it holds no committed generation: the run that made it ended before its first commit");
}

// The drive may be back tomorrow, and the generation with it.
io::Error not_read(const std::string& which, io::Error wrong) {
  wrong.detail += (wrong.detail.empty() ? "" : "; ") + which +
                  " cannot be read, and may be whole: nothing was written, and the state stays. Look at the drive, and "
                  "begin again";
  return wrong;
}

io::Error nothing_whole(const std::string& newest, std::uint64_t other, const io::Error& wrong) {
  return store_damaged("its newest generation cannot be read (" + newest + "), and " + name_of(other) +
                       ", which can, is not whole any more: the run had begun to overwrite it, or it is damaged too (" +
                       wrong.message() + "). What is left is what was exported before");
}

}  // namespace

io::Result<Store::Contents> Store::inspect(io::VolumeOptions options) {
  options.read_only = true;
  auto volume = io::Volume::open(options);
  if (!volume.ok()) return volume.error();
  auto found = readable_generations(**volume);
  if (!found.ok()) return found.error();
  if (found->empty()) return Contents{};
  const Manifest& manifest = found->front().manifest;
  return Contents{.generation = found->front().block.generation,
                  .identity = manifest.identity,
                  .progress = manifest.progress,
                  .chunk_elements = manifest.chunk_elements,
                  .generations = manifest.generations,
                  .passed_over = found->front().passed_over,
                  .unreadable = found->front().unreadable,
                  .damaged = found->front().damaged};
}

io::Result<std::unique_ptr<Store>> Store::open(StoreOptions options, const Layout& layout) {
  options.scratch = {.gradients = false};
  options.volume.read_only = true;
  std::unique_ptr<Store> store(new Store(std::move(options), layout));
  auto volume = io::Volume::open(store->options_.volume);
  if (!volume.ok()) return volume.error();
  store->volume_ = std::move(volume).value();
  auto generations = readable_generations(*store->volume_);
  if (!generations.ok()) return generations.error();
  if (generations->empty()) return nothing_committed();
  store->found_ = std::move(generations).value();
  const Generation& found = store->found_.front();
  if (io::Error error = store->take_over(found)) return error;
  if (found.passed_over.empty()) return store;
  if (io::Error wrong = store->scrub({}, {}))
    return wrong.kind == io::ErrorKind::io ? not_read(name_of(store->generation_), std::move(wrong))
                                           : nothing_whole(found.passed_over, store->generation_, wrong);
  store->notify("the store is opened at " + name_of(store->generation_) + ", which is whole; " + found.passed_over);
  return store;
}

io::Result<std::unique_ptr<Store>> Store::resume(StoreOptions options, const Layout& layout) {
  std::unique_ptr<Store> store(new Store(std::move(options), layout));
  {
    // Memory is registered with a volume before its first request: this one only looks.
    io::VolumeOptions looks = store->options_.volume;
    looks.read_only = true;
    auto volume = io::Volume::open(looks);
    if (!volume.ok()) return volume.error();
    auto generations = readable_generations(**volume);
    if (failed_at_the_drive(generations)) {
      store->wait_before_reading_again(generations.ok() ? generations->front().passed_over
                                                        : generations.error().message());
      generations = readable_generations(**volume);
    }
    if (!generations.ok()) return generations.error();
    store->found_ = std::move(generations).value();
  }
  if (store->found_.empty()) return nothing_committed();
  if (const io::Error& wrong = store->found_.front().unreadable;
      wrong && !(wrong.kind == io::ErrorKind::io && store->options_.go_back))
    return not_read("the newest generation", wrong);
  auto volume = io::Volume::open(store->options_.volume);
  if (!volume.ok()) return volume.error();
  store->volume_ = std::move(volume).value();
  if (io::Error error = store->take_over(store->found_.front())) return error;
  if (store->options_.generations != 2 || store->found_.front().manifest.version != kStoreVersion)
    return io::Error{.kind = io::ErrorKind::usage,
                     .operation = "resume",
                     .detail = "the store was not made to be gone on with; it can be exported"};
  store->refused_ = {.kind = io::ErrorKind::usage, .operation = "resume", .detail = "the store is not verified yet"};
  if (io::Error error = store->make_scratch()) return error;
  return store;
}

io::Error Store::verify_all(const RestoreProgress& progress) {
  io::Error wrong = scrub({}, progress);
  if (!wrong) return wrong;
  wrong.detail = name_of(generation_) + (wrong.detail.empty() ? "" : ": ") + wrong.detail;
  if (options_.generations != 2 || found_.size() < 2) return wrong;
  const Generation& before = found_.back();
  const bool whole = !take_over(before) && !scrub({}, progress);
  if (io::Error error = take_over(found_.front())) return error;
  wrong.detail += "; " + name_of(before.block.generation) +
                  (whole ? ", the one before it, is whole: a run goes on from there" : " is not whole either");
  return wrong;
}

io::Error Store::restore(const RestoredExtent& use, const RestoreProgress& progress) {
  std::string newest;
  io::Error wrong;
  for (const Generation& candidate : found_) {
    wrong = take_over(candidate);
    if (!wrong) wrong = scrub(use, progress);
    // Going back takes the newer one away: not for want of memory or a permission, nor for a drive that may be back.
    const bool may_go_back = &candidate != &found_.back() && options_.go_back;
    if (wrong && wrong.kind == io::ErrorKind::io && !may_go_back)
      return not_read(name_of(candidate.block.generation), std::move(wrong));
    if (wrong && wrong.kind != io::ErrorKind::corruption && wrong.kind != io::ErrorKind::io) return wrong;
    if (wrong && newest.empty()) {
      newest = name_of(candidate.block.generation) + ": " + wrong.message();
      if (!candidate.passed_over.empty()) newest += "; " + candidate.passed_over;
      continue;
    }
    if (wrong) break;
    // A power cut, or a flush that failed, may have left it in a drive's cache alone. What the run now writes would
    // take the generation before it away.
    if (io::Error error = publish_generation(*volume_, candidate.block, candidate.text)) return error;
    if (newest.empty()) newest = candidate.passed_over;
    if (!newest.empty()) notify("the store goes on from " + name_of(generation_) + ", which is whole; " + newest);
    found_.clear();
    std::lock_guard lock(mutex_);
    refused_ = {};
    return {};
  }
  if (found_.size() > 1) return nothing_whole(newest, found_.back().block.generation, wrong);
  return store_damaged("no generation is whole (" + newest + "). What is left is what was exported before");
}

io::Error Store::take_over(const Generation& found) {
  const Manifest& manifest = found.manifest;
  const std::size_t chunks = layout_.chunks().size();
  if (manifest.records.size() != 2 * chunks || manifest.chunk_elements != layout_.chunk_elements())
    return store_damaged("its manifest is of another model or another version");
  // Version 1 had a run's scratch behind what is committed.
  if (manifest.generations != options_.generations || volume_->size() < total_bytes_ ||
      (manifest.version > 1 && volume_->size() != total_bytes_))
    return store_damaged("its size is not that of this model and these options");
  for (std::size_t index = 0; index < 2 * chunks; ++index) {
    if (manifest.records[index].generation > found.block.generation)
      return store_damaged("its manifest names a generation that is newer than itself");
    records_[index / chunks][index % chunks] = manifest.records[index];
  }
  committed_words_ = records_[static_cast<int>(ExtentKind::hi)];
  committed_state_ = records_[static_cast<int>(ExtentKind::state)];
  run_id_ = found.block.run_id;
  generation_ = found.block.generation;
  options_.identity = manifest.identity;
  progress_ = manifest.progress;
  return {};
}

// What lies beside the store, then every extent that was written, in the order in which they lie there, some ahead.
io::Error Store::scrub(const RestoredExtent& use, const RestoreProgress& progress) {
  if (options_.check_beside)
    if (io::Error error = options_.check_beside(generation_, progress_)) return error;
  struct Reading {
    ExtentKind kind;
    int index;
    io::Completion completion;
    bool arrived = false;
  };
  std::vector<std::pair<ExtentKind, int>> extents;
  std::uint64_t done = 0, total = 0, largest = 0;
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    for (int index = 0; index < static_cast<int>(layout_.chunks().size()); ++index)
      if (record(kind, index).written) {
        extents.emplace_back(kind, index);
        total += extent_bytes(kind, index);
        largest = std::max(largest, extent_bytes(kind, index));
      }
  if (extents.empty()) return store_damaged("it has no extents");
  const std::uint64_t ahead =
      std::clamp<std::uint64_t>(kScrubBytes / largest, 2, std::max<std::size_t>(2, extents.size()));
  std::vector<io::Buffer> free = io::allocate_buffers(ahead, largest);
  if (free.empty()) return {.kind = io::ErrorKind::memory, .operation = "verify the store", .length = ahead * largest};
  std::mutex mutex;
  std::condition_variable wakes;
  std::deque<Reading> readings;
  const auto read_ahead = [&](std::size_t& next) {
    for (; next < extents.size() && !free.empty(); ++next) {
      const auto [kind, index] = extents[next];
      Reading& reading = readings.emplace_back(Reading{.kind = kind, .index = index});
      io::Buffer buffer = std::move(free.back());
      free.pop_back();
      read(kind, index, std::move(buffer), [&](io::Completion&& completion) {
        std::lock_guard lock(mutex);
        reading.completion = std::move(completion);
        reading.arrived = true;
        wakes.notify_one();
      });
    }
  };
  // Of an error, or where `use` or `progress` throws: what is under way still comes here.
  struct Awaited {
    std::mutex& mutex;
    std::condition_variable& wakes;
    const std::deque<Reading>& readings;
    ~Awaited() {
      std::unique_lock lock(mutex);
      wakes.wait(lock, [&] { return std::ranges::all_of(readings, &Reading::arrived); });
    }
  } const awaited{mutex, wakes, readings};
  for (std::size_t next = 0; next < extents.size() || !readings.empty();) {
    read_ahead(next);
    Reading& reading = readings.front();
    {
      std::unique_lock lock(mutex);
      wakes.wait(lock, [&] { return reading.arrived; });
    }
    const std::uint64_t bytes = extent_bytes(reading.kind, reading.index);
    const io::Error failed = reading.completion.error;
    // A drive that does not answer was waited for long enough.
    if (failed && (failed.kind != io::ErrorKind::io || failed.error_number == ETIMEDOUT)) return failed;
    if (failed) wait_before_reading_again(failed.message());
    io::Buffer found = std::move(reading.completion.buffer), again;
    if (failed || verify(reading.kind, reading.index, found.bytes().first(bytes))) {
      auto fetched = fetch(reading.kind, reading.index);
      if (!fetched.ok()) return fetched.error();
      again = std::move(fetched).value();
    }
    if (use) use(reading.kind, reading.index, (again ? again : found).bytes().first(bytes));
    free.push_back(std::move(found));
    readings.pop_front();
    done += bytes;
    if (progress) progress(done, total);
  }
  return {};
}

void Store::wait_before_reading_again(const std::string& why) const {
  const auto wait = options_.read_retry_delay;
  notify(why + "; it is read once more in " + std::to_string((wait.count() + 999) / 1000) + " s");
  std::this_thread::sleep_for(wait);
}

void Store::notify(std::string text) const {
  if (options_.volume.on_notice) options_.volume.on_notice({io::Notice::Kind::retried, std::move(text)});
}

}  // namespace tierflow::swap
