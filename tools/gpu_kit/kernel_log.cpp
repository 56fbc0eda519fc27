/// A library that writes down which kernels, copies and fills a process gives to a GPU, and when each ran there: CUDA's
/// driver loads it into a program for which CUDA_INJECTION64_PATH names it, and it writes to the file that KERNEL_LOG
/// names, as soon as the file that KERNEL_LOG_WHEN names exists. Until then the program runs as without it. Lines, in
/// no order of time:
///   name ID TEXT                      of a kernel, before the first line that has that ID
///   kernel ID STREAM BEGIN END        nanoseconds of the device's clock
///   copy KIND STREAM BEGIN END BYTES  KIND as CUPTI numbers it: 1 to the device, 2 to the host, 8 on the device
///   fill 0 STREAM BEGIN END BYTES
/// A process that is killed leaves all but its last second. A log that has begun has the line "begin".
#include <cupti.h>
#include <cxxabi.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

namespace {

constexpr size_t buffer_bytes = 256 << 10;  // a thousand kernels
constexpr auto flush_period = std::chrono::milliseconds(500);

struct Log {
  std::mutex mutex;
  std::FILE* file = nullptr;
  std::unordered_map<std::string, int> names;
};

Log& log() {
  static Log* made = new Log;  // outlives the threads of CUPTI, which write while the process ends
  return *made;
}

std::string readable(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string made = status == 0 ? text : mangled;
  std::free(text);
  return made;
}

void write(Log& log, const CUpti_Activity& record) {
  if (record.kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    const auto& kernel = reinterpret_cast<const CUpti_ActivityKernel10&>(record);
    const auto [place, added] =
        log.names.try_emplace(kernel.name ? kernel.name : "", static_cast<int>(log.names.size()));
    if (added) std::fprintf(log.file, "name %d %s\n", place->second, readable(place->first.c_str()).c_str());
    std::fprintf(log.file, "kernel %d %u %" PRIu64 " %" PRIu64 "\n", place->second, kernel.streamId, kernel.start,
                 kernel.end);
  } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const auto& copy = reinterpret_cast<const CUpti_ActivityMemcpy6&>(record);
    std::fprintf(log.file, "copy %d %u %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", copy.copyKind, copy.streamId, copy.start,
                 copy.end, copy.bytes);
  } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    const auto& fill = reinterpret_cast<const CUpti_ActivityMemset4&>(record);
    std::fprintf(log.file, "fill 0 %u %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", fill.streamId, fill.start, fill.end,
                 fill.bytes);
  }
}

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, buffer_bytes));
  *size = *buffer ? buffer_bytes : 0;
  *most_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t filled) {
  {
    const std::lock_guard lock(log().mutex);
    CUpti_Activity* record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, filled, &record) == CUPTI_SUCCESS) write(log(), *record);
    std::fflush(log().file);
  }
  std::free(buffer);
}

// CUPTI's own periodic flush hands out full buffers alone, and the process may be killed before one is.
void flush_for_ever() {
  for (;;) {
    std::this_thread::sleep_for(flush_period);
    cuptiActivityFlushAll(0);
  }
}

// On a thread of its own, which stays.
void begin() {
  CUptiResult result = cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET})
    if (result == CUPTI_SUCCESS) result = cuptiActivityEnable(kind);
  if (result == CUPTI_SUCCESS) {
    {
      const std::lock_guard lock(log().mutex);
      std::fputs("begin\n", log().file);
      std::fflush(log().file);
    }
    flush_for_ever();
  }
  const char* text = "unknown error";
  cuptiGetResultString(result, &text);
  std::fprintf(stderr, "kernel_log: CUPTI refuses: %s\n", text);
}

void begin_when(const std::string& exists) {
  while (::access(exists.c_str(), F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  begin();
}

}  // namespace

/// The driver calls it when it is initialized. 1: go on.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  const char *path = std::getenv("KERNEL_LOG"), *when = std::getenv("KERNEL_LOG_WHEN");
  log().file = path && when ? std::fopen(path, "w") : nullptr;
  if (log().file)
    std::thread(begin_when, std::string(when)).detach();
  else
    std::fprintf(stderr, "kernel_log: nothing is written: %s\n",
                 path && when ? path : "KERNEL_LOG or KERNEL_LOG_WHEN is not set");
  return 1;
}
