#include "runtime/models/micro_batch.h"

#include <ATen/ATen.h>

#include <limits>

#include "runtime/base/exception.h"

namespace tierflow {
namespace {

// Of tokens [.., sequence, or sequence, each]: the first that is not in [least, vocabulary) is named.
template <class Id>
void check_range(const at::Tensor& tokens, std::int64_t each, Id least, std::int64_t vocabulary,
                 const std::string& called, const char* what) {
  if (vocabulary <= 0) return;
  const at::Tensor on_host = tokens.cpu().contiguous();
  const Id* token = on_host.const_data_ptr<Id>();
  const std::int64_t length = on_host.numel() / (on_host.size(0) * each);
  for (std::int64_t i = 0; i < on_host.numel(); ++i)
    if (token[i] < least || token[i] >= vocabulary)
      fail_usage(called + ": " + what + " " + std::to_string(token[i]) + " of token " +
                 std::to_string(i / each % length) + " in row " + std::to_string(i / each / length) +
                 " is beyond the vocabulary of " + std::to_string(vocabulary));
}

void expect_type(const at::Tensor& tokens, at::ScalarType type, const std::string& called, const char* what) {
  if (tokens.scalar_type() != type)
    fail_usage(called + ": " + what + " are " + c10::toString(type) + ", not " + c10::toString(tokens.scalar_type()));
}

}  // namespace

at::Tensor document_ends(const std::vector<Document>& documents) {
  at::Tensor ends = at::empty({static_cast<std::int64_t>(documents.size()) + 1}, at::kInt);
  auto* end = ends.mutable_data_ptr<std::int32_t>();
  *end = 0;
  for (const Document& document : documents) {
    end[1] = end[0] + static_cast<std::int32_t>(document.length);
    ++end;
  }
  return ends;
}

void check_tokens(const MicroBatch& batch, std::int64_t vocabulary, const std::string& called) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::min();  // below 0: it does not count
  constexpr std::int32_t kAnyTeacher = std::numeric_limits<std::int32_t>::min();
  if (batch.ids.numel() == 0) return;
  expect_type(batch.ids, at::kLong, called, "ids");
  check_range<std::int64_t>(batch.ids, 1, 0, vocabulary, called, "id");
  if (batch.labels.defined()) {
    expect_type(batch.labels, at::kLong, called, "labels");
    check_range<std::int64_t>(batch.labels, 1, kAny, vocabulary, called, "label");
  }
  if (!batch.teacher_ids.defined() || batch.teacher_ids.numel() == 0) return;
  expect_type(batch.teacher_ids, at::kInt, called, "ids of the teacher");
  check_range<std::int32_t>(batch.teacher_ids, batch.teacher_ids.size(-1), kAnyTeacher, vocabulary, called,
                            "the teacher's id");
}

std::int64_t MicroBatch::target_tokens() const {
  return labels.ge(0).sum().item<std::int64_t>();
}

std::vector<Document> MicroBatch::documents() const {
  if (!positions.defined()) return {};
  const auto wrong = [](const std::string& what) { fail_usage(what); };
  if (positions.scalar_type() != at::kLong)
    wrong(std::string("positions are int64, not ") + c10::toString(positions.scalar_type()));
  if (ids.dim() != 2 || positions.sizes() != ids.sizes()) wrong("positions have the shape of ids");
  const at::Tensor on_host = positions.cpu().contiguous();
  const std::int64_t rows = ids.size(0), length = ids.size(1);
  const std::int64_t* position = on_host.const_data_ptr<std::int64_t>();
  std::vector<Document> documents;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t token = 0; token < length; ++token, ++position) {
      if (*position == 0) {
        documents.push_back({.row = row, .begin = token});
      } else if (token == 0 || *position != position[-1] + 1) {
        wrong("position " + std::to_string(*position) + " of token " + std::to_string(token) + " in row " +
              std::to_string(row) + (token == 0 ? "" : " comes after " + std::to_string(position[-1])) +
              ": a document's positions count up by one from 0, and each row begins with a document");
      }
      ++documents.back().length;
    }
  }
  return documents.size() == static_cast<std::size_t>(rows) ? std::vector<Document>{} : documents;
}

}  // namespace tierflow
