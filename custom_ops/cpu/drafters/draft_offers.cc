#include "draft_offers.h"

#include <algorithm>

namespace fdsd {

AskedDrafters::AskedDrafters(const ControllerCreateParams& p) {
  for (int32_t s = 0; s < p.num_sources; ++s)
    drafters_.push_back({reinterpret_cast<void*>(p.drafters[s]), reinterpret_cast<Propose>(p.proposes[s])});
}

bool AskedDrafters::AllowsDrafts(const ControllerRowsParams& x) {
  return std::any_of(x.max_draft_len, x.max_draft_len + x.num_rows, [](int32_t n) { return n > 0; });
}

Error AskedDrafters::Ask(const ControllerRowsParams& x, uint64_t skipped, const ControllerOffersParams& to) const {
  const bool is_allowed = AllowsDrafts(x);
  for (size_t s = 0; s < drafters_.size(); ++s) {
    if (drafters_[s].drafter == nullptr) continue;
    const auto plane = static_cast<int64_t>(s);
    DraftProposeParams asked{};
    asked.drafter = drafters_[s].drafter;
    asked.num_rows = x.num_rows;
    asked.num_table_rows = x.num_table_rows;
    asked.max_tokens_per_row = x.max_tokens_per_row;
    asked.max_num_drafts = to.max_num_drafts;
    asked.token_table = x.token_table;
    asked.table_rows = x.table_rows;
    asked.num_tokens = x.num_tokens;
    asked.max_draft_len = x.max_draft_len;
    asked.prefix_token_ids = x.prefix_token_ids;
    asked.cu_num_prefix = x.cu_num_prefix;
    asked.draft_token_ids = to.token_ids + plane * to.max_num_drafts;
    asked.cu_num_draft = to.cu_num_draft + plane * (to.max_num_rows + 1);
    asked.evidence = to.evidence + plane * to.max_num_rows * DraftEvidence::kNumFields;
    asked.draft_prob = to.draft_prob + plane * to.max_num_drafts;
    if (to.parents != nullptr) asked.draft_parents = to.parents + plane * to.max_num_drafts;
    if (!is_allowed || (skipped >> s & 1) != 0) {
      std::fill_n(asked.cu_num_draft, x.num_rows + 1, 0);
    } else if (Error error = drafters_[s].propose(&asked)) {
      return error;
    }
  }
  return nullptr;
}

int32_t AskedDrafters::CountOffered(const ControllerRowsParams& x, const ControllerOffersParams& offers) const {
  int32_t count = 0;
  for (size_t s = 0; s < drafters_.size(); ++s)
    if (drafters_[s].drafter != nullptr)
      count += offers.cu_num_draft[static_cast<int64_t>(s) * (offers.max_num_rows + 1) + x.num_rows];
  return count;
}

Error AskedDrafters::CheckOffers(const ControllerRowsParams& x, const ControllerOffersParams& offers) const {
  for (size_t s = 0; s < drafters_.size(); ++s) {
    const int32_t* cu = offers.cu_num_draft + static_cast<int64_t>(s) * (offers.max_num_rows + 1);
    if (cu[0] != 0) return "offers: expected offsets from 0, got others";
    for (int32_t r = 0; r < x.num_rows; ++r)
      if (cu[r + 1] < cu[r]) return "offers: expected rising offsets, got a decrease";
    if (cu[x.num_rows] > offers.max_num_drafts) return "offers: expected offsets within the plane, got more";
    const int32_t* parents = offers.parents + static_cast<int64_t>(s) * offers.max_num_drafts;
    for (int32_t r = 0; offers.parents != nullptr && r < x.num_rows; ++r)
      for (int32_t i = cu[r]; i < cu[r + 1]; ++i)
        if (parents[i] < -1 || parents[i] >= i - cu[r])
          return "offers: expected drafts that follow -1 or an earlier one of the row, got another parent";
  }
  return nullptr;
}

}  // namespace fdsd
