#pragma once
// The packed token file of a dataset. It is written once, then read in any order. It has no name, and a folder made for
// it goes with it, so nothing is left behind.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/files.h"

namespace tierflow {

class TokenStore {
 public:
  TokenStore(std::filesystem::path folder, std::int64_t vocab_size);
  ~TokenStore();
  // Throws Exception: input, naming `where`, for an id that is not below the vocabulary's size; environment where the
  // folder is full.
  void append(const std::string& where, std::span<const std::uint32_t> ids);
  void append_bytes(const std::string& where, std::span<const std::uint8_t> bytes);
  // Ends writing.
  void seal();
  std::int64_t size() const { return count_; }
  std::uint64_t hash() const { return hash_; }
  void read(std::int64_t first, std::span<std::int64_t> out) const;

 private:
  struct Hasher;
  template <class Id>
  void append_ids(const std::string& where, std::span<const Id> ids);
  void flush();

  std::filesystem::path folder_;
  BorrowedFolder borrowed_;
  std::int64_t vocab_size_;
  int width_;
  File file_;
  std::vector<std::byte> pending_;
  std::unique_ptr<Hasher> hasher_;
  std::int64_t count_ = 0;
  std::uint64_t hash_ = 0;
};

}  // namespace tierflow
