#include "runtime/data/token_store.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "runtime/base/exception.h"
#include "runtime/base/signals.h"
#include "runtime/data/data_source.h"

namespace tierflow {
namespace {

constexpr std::size_t flush_bytes = 1 << 20;

}  // namespace

struct TokenStore::Hasher {
  Hasher() { XXH3_64bits_reset(&state); }
  XXH3_state_t state;
};

TokenStore::TokenStore(std::filesystem::path folder, std::int64_t vocab_size)
    : folder_(folder.empty() ? temporary_folder() : std::move(folder)),
      borrowed_(folder_),
      vocab_size_(vocab_size),
      width_(token_width(vocab_size)),
      hasher_(std::make_unique<Hasher>()) {
  file_ = create_nameless(folder_);
  pending_.reserve(flush_bytes + 4);
}

TokenStore::~TokenStore() = default;

void TokenStore::flush() {
  throw_if_stopped();
  if (pending_.empty()) return;
  XXH3_64bits_update(&hasher_->state, pending_.data(), pending_.size());
  try {
    write_exactly(file_, folder_, pending_);
  } catch (const Exception& error) {
    io::Error full = error.error();
    full.detail =
        "writing the packed tokens; free some space, or name another folder: --storage, else TMPDIR in the environment";
    throw Exception(std::move(full));
  }
  pending_.clear();
}

template <class Id>
void TokenStore::append_ids(const std::string& where, std::span<const Id> ids) {
  for (const Id id : ids) {
    if (id >= vocab_size_)
      fail_input(where,
                 fmt::format("holds the token id {} (token {} of the data), but the model's vocabulary ends at {}",
                             id == UINT32_MAX ? std::string("negative or above 2^32-2") : std::to_string(id), count_,
                             vocab_size_ - 1));
    const std::uint32_t word = id;
    const auto* bytes = reinterpret_cast<const std::byte*>(&word);
    pending_.insert(pending_.end(), bytes, bytes + width_);
    ++count_;
    if (pending_.size() >= flush_bytes) flush();
  }
}

void TokenStore::append(const std::string& where, std::span<const std::uint32_t> ids) {
  append_ids(where, ids);
}
void TokenStore::append_bytes(const std::string& where, std::span<const std::uint8_t> bytes) {
  append_ids(where, bytes);
}

void TokenStore::seal() {
  flush();
  hash_ = XXH3_64bits_digest(&hasher_->state);
}

void TokenStore::read(std::int64_t first, std::span<std::int64_t> out) const {
  std::vector<std::byte> bytes(out.size() * static_cast<std::size_t>(width_));
  read_exactly(file_, folder_, static_cast<std::uint64_t>(first) * static_cast<unsigned>(width_), bytes);
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint32_t id = 0;
    std::memcpy(&id, bytes.data() + i * static_cast<std::size_t>(width_), static_cast<std::size_t>(width_));
    out[i] = id;
  }
}

}  // namespace tierflow
