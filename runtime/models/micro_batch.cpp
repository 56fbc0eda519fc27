#include "runtime/models/micro_batch.h"

#include <ATen/ATen.h>

#include "runtime/base/exception.h"

namespace tierflow {

std::int64_t MicroBatch::target_tokens() const {
  return labels.ge(0).sum().item<std::int64_t>();
}

std::vector<Document> MicroBatch::documents() const {
  if (!positions.defined()) return {};
  const auto wrong = [](const std::string& what) { throw Exception(io::ErrorKind::usage, what); };
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
