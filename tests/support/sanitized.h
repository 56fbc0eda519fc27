#pragma once
// TIERFLOW_ADDRESSES_SANITIZED: the address sanitizer is on, whether gcc says so or clang.
#ifdef __SANITIZE_ADDRESS__
#define TIERFLOW_ADDRESSES_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TIERFLOW_ADDRESSES_SANITIZED
#endif
#endif
