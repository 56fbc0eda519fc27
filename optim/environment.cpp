// The floating-point environment of a call. MXCSR and FPCR hold rounding mode, flush-to-zero and exception masks.
#include "optim/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tierflow::optim {

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) {
  _mm_setcsr(0x1f80);
}  // all exceptions masked, nearest, no flushing
FloatEnvironment::~FloatEnvironment() {
  _mm_setcsr(static_cast<unsigned>(saved_));
}
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));
}
FloatEnvironment::~FloatEnvironment() {
  asm volatile("msr fpcr, %0" ::"r"(saved_));
}
#else
FloatEnvironment::FloatEnvironment() = default;
FloatEnvironment::~FloatEnvironment() = default;
#endif

}  // namespace tierflow::optim
