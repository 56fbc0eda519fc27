#pragma once
/// Stands in for CUPTI in the test of tools/gpu_kit/kernel_log.cpp, with what its documentation says of buffers: a
/// periodic flush hands out full ones alone, cuptiActivityFlushAll all of them. Kernels are those of run_kernel().
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

#define CUPTIAPI

using CUcontext = void*;
enum CUptiResult { CUPTI_SUCCESS, CUPTI_ERROR_MAX_LIMIT_REACHED };
enum CUpti_ActivityKind {
  CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
  CUPTI_ACTIVITY_KIND_MEMCPY,
  CUPTI_ACTIVITY_KIND_MEMSET
};

struct CUpti_Activity {
  CUpti_ActivityKind kind;
};
struct CUpti_ActivityKernel10 : CUpti_Activity {
  uint32_t streamId;
  uint64_t start, end;
  const char* name;
};
struct CUpti_ActivityMemcpy6 : CUpti_Activity {
  uint8_t copyKind;
  uint32_t streamId;
  uint64_t start, end, bytes;
};
struct CUpti_ActivityMemset4 : CUpti_Activity {
  uint32_t streamId;
  uint64_t start, end, bytes;
};

struct StandIn {
  std::mutex mutex;
  void (*give)(uint8_t**, size_t*, size_t*) = nullptr;
  void (*take)(CUcontext, uint32_t, uint8_t*, size_t, size_t) = nullptr;
  bool enabled = false;
  uint8_t* buffer = nullptr;
  size_t size = 0, filled = 0, records = 0;

  void hand_out() {
    if (buffer != nullptr) take(nullptr, 0, buffer, size, filled);
    buffer = nullptr;
    size = filled = 0;
  }
};
inline StandIn stand_in;

inline CUptiResult cuptiActivityRegisterCallbacks(decltype(StandIn::give) give, decltype(StandIn::take) take) {
  stand_in.give = give;
  stand_in.take = take;
  return CUPTI_SUCCESS;
}
inline CUptiResult cuptiActivityEnable(CUpti_ActivityKind) {
  const std::lock_guard lock(stand_in.mutex);
  stand_in.enabled = true;
  return CUPTI_SUCCESS;
}
inline CUptiResult cuptiActivityFlushAll(uint32_t) {
  const std::lock_guard lock(stand_in.mutex);
  stand_in.hand_out();
  return CUPTI_SUCCESS;
}
inline CUptiResult cuptiActivityFlushPeriod(uint32_t) {
  return CUPTI_SUCCESS;
}
inline CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t filled, CUpti_Activity** record) {
  uint8_t* next = *record == nullptr ? buffer : reinterpret_cast<uint8_t*>(*record) + sizeof(CUpti_ActivityKernel10);
  if (next == buffer + filled) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = reinterpret_cast<CUpti_Activity*>(next);
  return CUPTI_SUCCESS;
}
inline void cuptiGetResultString(CUptiResult, const char** text) {
  *text = "an error";
}

/// A kernel that the device has run; not logged where nothing is enabled yet.
inline void run_kernel(uint32_t stream, uint64_t begin, uint64_t end, const char* name) {
  const std::lock_guard lock(stand_in.mutex);
  if (!stand_in.enabled) return;
  CUpti_ActivityKernel10 record;
  record.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
  record.streamId = stream;
  record.start = begin;
  record.end = end;
  record.name = name;
  if (stand_in.filled + sizeof record > stand_in.size) {
    stand_in.hand_out();
    size_t most = 0;
    stand_in.give(&stand_in.buffer, &stand_in.size, &most);
  }
  std::memcpy(stand_in.buffer + stand_in.filled, &record, sizeof record);
  stand_in.filled += sizeof record;
}
