#pragma once
// Memory of a GPU, for tests that know nothing of CUDA.
#include <cstddef>
#include <memory>

namespace tierflow::optim {

bool gpu_is_here();

// Bytes on the GPU.
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t bytes);
  void set(const void* from, std::size_t bytes);
  void get(void* to, std::size_t bytes) const;  // after what was enqueued on the default stream
  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }

 private:
  std::shared_ptr<void> data_;
};

}  // namespace tierflow::optim
