#pragma once
// A folder in memory, of which one weight is put together.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "runtime/checkpoint/packed_weight.h"
#include "tests/runtime/expect.h"

namespace tierflow::testing {

using Shape = std::vector<std::int64_t>;

inline std::uint64_t elements_of(const Shape& shape) {
  std::uint64_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::uint64_t>(size);
  return count;
}

class FolderOfOneWeight : public ::testing::Test {
 protected:
  void put(const std::string& name, const std::string& dtype, const Shape& shape, const std::string& bytes) {
    tensors_[name] = {.dtype = dtype, .shape = shape, .offset = data_.size(), .bytes = bytes.size()};
    data_ += bytes;
  }
  void put(const std::string& name, const Shape& shape, const std::vector<float>& values) {
    put(name, "F32", shape, {reinterpret_cast<const char*>(values.data()), 4 * values.size()});
  }
  // So many bytes, none like its neighbours.
  static std::string codes(std::uint64_t count, unsigned least = 0, unsigned most = 255) {
    std::string bytes(count, '\0');
    for (std::uint64_t i = 0; i < count; ++i)
      bytes[i] = static_cast<char>(least + (i * 2654435761U >> 7) % (most - least + 1));
    return bytes;
  }
  std::uint8_t byte(const std::string& name, std::uint64_t at) const {
    return static_cast<std::uint8_t>(data_.at(tensors_.at(name).offset + at));
  }
  float number(const std::string& name, std::uint64_t at) const {
    float value = 0;
    read(tensors_.at(name), 4 * at, std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }

  std::shared_ptr<const PackedWeight> weight() const { return packed_weight("m.weight", "here", parts_); }
  void refused(std::initializer_list<std::string_view> words) const {
    expect_refusal(io::ErrorKind::input, words, [&] { weight(); });
  }
  // However it is cut, the weight has the values that `value` gives for each element.
  template <class Value>
  void expect_values(const Shape& shape, Value value) const {
    const auto packed = weight();
    ASSERT_NE(packed, nullptr);
    ASSERT_EQ(packed->shape(), shape);
    const std::uint64_t count = elements_of(shape);
    for (const std::uint64_t cut : {count, std::min<std::uint64_t>(count, 129), std::min<std::uint64_t>(count, 7)}) {
      std::vector<float> piece(cut);
      const std::uint64_t step = cut == count ? cut : std::max(cut, count / 50 | 1);
      for (std::uint64_t first = 0; first < count; first += step) {
        const auto out = std::span(piece).first(std::min(cut, count - first));
        packed->read(first, out);
        for (std::uint64_t i = 0; i < out.size(); ++i)
          ASSERT_EQ(out[i], value(first + i)) << first + i << " of a piece from " << first;
      }
    }
  }

  const RawTensor* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  void read(const RawTensor& tensor, std::uint64_t offset, std::span<std::byte> out) const {
    ASSERT_LE(offset + out.size(), tensor.bytes);
    std::memcpy(out.data(), data_.data() + tensor.offset + offset, out.size());
  }

  std::map<std::string, RawTensor> tensors_;
  std::string data_;
  const PackedParts parts_ = {
      .find = [this](const std::string& name) { return find(name); },
      .read = [this](const RawTensor& tensor, std::uint64_t offset,
                     std::span<std::byte> out) { read(tensor, offset, out); },
      .floats = [this](const std::string& name, std::uint64_t first,
                       std::span<float> out) { read(tensors_.at(name), 4 * first, std::as_writable_bytes(out)); }};
};

}  // namespace tierflow::testing
