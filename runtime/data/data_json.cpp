#include "runtime/data/data_json.h"

#include <nlohmann/json.hpp>

namespace tierflow {

nlohmann::ordered_json data_json(const std::vector<DataSummary>& data) {
  auto list = nlohmann::ordered_json::array();
  for (const DataSummary& one : data) {
    auto paths = nlohmann::ordered_json::array();
    for (const auto& path : one.paths) paths.push_back(path.string());
    nlohmann::ordered_json object{{"data", paths},
                                  {"share", one.share},
                                  {"format", one.rows ? one.rows->formats : "text"},
                                  {"packing", one.packing},
                                  {"tokens", one.tokens},
                                  {"sequences", one.sequences},
                                  {"held_out", one.held_out},
                                  {"bad_rows", one.skipped}};
    if (one.skipped != 0) object["first_bad_row"] = one.first_skipped;
    if (one.other_files != 0) {
      object["other_files"] = one.other_files;
      object["first_other_file"] = one.first_other_file;
    }
    if (one.rows) {
      const RowSummary& rows = *one.rows;
      object["examples"] = rows.examples;
      object["tokens_in_sequences"] = rows.used;
      object["trained_tokens"] = rows.trained;
      object["train_on"] = rows.train_on;
      object["masks"] = rows.masks;
      object["truncated"] = rows.truncated;
      object["dropped"] = {{"untrained", rows.untrained}, {"untrained_when_cut", rows.untrained_when_cut}};
      object["merged_prompts"] = rows.merged;
      object["prepared"] = rows.prepared.string();
      auto lengths = nlohmann::ordered_json::array();
      for (std::size_t i = 0; i < rows.lengths.size(); ++i)
        if (rows.lengths[i] != 0) lengths.push_back({{"up_to", std::int64_t{1} << i}, {"examples", rows.lengths[i]}});
      object["lengths"] = lengths;
    }
    list.push_back(object);
  }
  return list;
}

}  // namespace tierflow
