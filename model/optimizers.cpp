#include "model/optimizers.h"

#include <algorithm>

#include "kernels/base/check.h"

// Defaults are torch.optim's, except AdamW's beta2, which is GPT-3's, and SGD's momentum. Lion, LAMB, LARS, NorMuon,
// SOAP and SOAP-Muon have their sources' defaults.
static const std::vector<OptimizerRow>& optimizer_table() {
    using S = OptimizerSettings;
    using K = OptimizerKind;
    const auto rows_by_rows = [](size_t rows, size_t) { return std::vector{rows, rows}; };
    const auto cols_by_cols = [](size_t, size_t cols) { return std::vector{cols, cols}; };
    const auto whole = [](size_t rows, size_t cols) { return std::vector{rows, cols}; };
    static const std::vector<MatrixSlot> soap_slots = {{"m", whole},
                                                       {"v", whole},
                                                       {"left", rows_by_rows},
                                                       {"right", cols_by_cols},
                                                       {"left_basis", rows_by_rows},
                                                       {"right_basis", cols_by_cols}};
    static const std::vector<OptimizerRow> table = {
        {K::adamw, {{"m"}, {"v"}}, {{&S::beta1, 0.9}, {&S::beta2, 0.95}, {&S::eps, 1e-8}}},
        {K::adam, {{"m"}, {"v"}}, {{&S::beta1, 0.9}, {&S::beta2, 0.999}, {&S::eps, 1e-8}}},
        {K::sgd, {{"m"}}, {{&S::momentum, 0.9}, {&S::nesterov, false}}},
        {K::lion, {{"m"}}, {{&S::beta1, 0.9}, {&S::beta2, 0.99}}},
        {K::rmsprop, {{"v"}}, {{&S::alpha, 0.99}, {&S::eps, 1e-8}}},
        {K::adagrad, {{"v"}}, {{&S::eps, 1e-10}}},
        {K::lamb, {{"m"}, {"v"}}, {{&S::beta1, 0.9}, {&S::beta2, 0.999}, {&S::eps, 1e-6}}, UpdateScope::layer},
        {K::lars, {{"m"}}, {{&S::momentum, 0.9}, {&S::trust_coefficient, 0.001}}, UpdateScope::layer},
        {K::adafactor,
         {},
         {{&S::eps, 0x1p-23}, {&S::beta2_decay, -0.8}, {&S::clip_threshold, 1}},
         UpdateScope::factors},
        {K::muon, {{"m"}}, {{&S::momentum, 0.95}, {&S::nesterov, true}}, UpdateScope::matrix},
        {K::normuon,
         {{"m"}},
         {{&S::momentum, 0.95}, {&S::nesterov, true}, {&S::muon_beta2, 0.95}},
         UpdateScope::matrix,
         {{"row_v", [](size_t rows, size_t) { return std::vector{rows}; }}}},
        {K::soap,
         {},
         {{&S::beta1, 0.95}, {&S::beta2, 0.95}, {&S::eps, 1e-8}, {&S::soap_interval, 10}},
         UpdateScope::matrix,
         soap_slots,
         Dtype::fp32,
         2},
        {K::soap_muon,
         {},
         {{&S::momentum, 0.95}, {&S::nesterov, true}, {&S::muon_beta2, 0.9}, {&S::eps, 1e-8}, {&S::soap_interval, 1}},
         UpdateScope::matrix,
         soap_slots,
         Dtype::fp32},
    };
    return table;
}

const OptimizerRow& optimizer_row(OptimizerKind kind) {
    const auto row = std::ranges::find(optimizer_table(), kind, &OptimizerRow::kind);
    require(row != optimizer_table().end(), "optimizer %d is not in the table", int(kind));
    return *row;
}

std::optional<OptimizerKind> OptimizerSettings::without_slots() const {
    if (optimizer_row(name).slots.empty()) return name;
    if (optimizer_row(name).is_of_matrices() && optimizer_row(scalar_name).slots.empty()) return scalar_name;
    return std::nullopt;
}

std::string users_of(SettingMember setting) {
    std::string users;
    for (const OptimizerRow& row : optimizer_table())
        if (std::ranges::find(row.settings, setting, &OptimizerSetting::member) != row.settings.end())
            users += (users.empty() ? "" : ", ") + std::string(name_of(row.kind));
    return users;
}

static void assign(OptimizerSettings& settings, const OptimizerSetting& setting) {
    if (const auto* number = std::get_if<double OptimizerSettings::*>(&setting.member))
        settings.** number = setting.initial;
    else if (const auto* whole = std::get_if<int OptimizerSettings::*>(&setting.member))
        settings.** whole = int(setting.initial);
    else
        settings.*std::get<bool OptimizerSettings::*>(setting.member) = setting.initial != 0;
}

void set_optimizer(OptimizerSettings& settings, OptimizerKind kind) {
    const OptimizerRow& row = optimizer_row(kind);
    settings.name = kind;
    for (const OptimizerKind reads : {row.is_of_matrices() ? settings.scalar_name : kind, kind})
        for (const OptimizerSetting& setting : optimizer_row(reads).settings) assign(settings, setting);
}
