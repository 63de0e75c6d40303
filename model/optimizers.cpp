#include "model/optimizers.h"

#include <algorithm>

#include "kernels/base/check.h"

static const std::vector<OptimizerRow>& optimizer_table() {
    using S = OptimizerSettings;
    static const std::vector<OptimizerRow> table = {
        {OptimizerKind::adamw, {{"m"}, {"v"}}, {&S::beta1, &S::beta2, &S::eps}},
        {OptimizerKind::sgd, {{"m"}}, {&S::momentum}},
    };
    return table;
}

const OptimizerRow& optimizer_row(OptimizerKind kind) {
    const auto row = std::ranges::find(optimizer_table(), kind, &OptimizerRow::kind);
    require(row != optimizer_table().end(), "optimizer %d is not in the table", int(kind));
    return *row;
}

std::string users_of(double OptimizerSettings::*setting) {
    std::string users;
    for (const OptimizerRow& row : optimizer_table())
        if (std::ranges::find(row.settings, setting) != row.settings.end())
            users += (users.empty() ? "" : ", ") + std::string(name_of(row.kind));
    return users;
}
