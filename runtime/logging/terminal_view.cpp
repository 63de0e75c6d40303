#include "runtime/logging/terminal_view.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr size_t kMostMeans = 2048;
constexpr int kLabelColumns = 9;  // of the axis labels and the axis
constexpr int kWidest = 120;      // wider lines are hard to read

// Encodes a code point below U+10000 in UTF-8.
std::string utf8(int code) {
    return {char(0xe0 | code >> 12), char(0x80 | (code >> 6 & 63)), char(0x80 | (code & 63))};
}

// A grid of dots: 2 x 4 of them in each braille character, else one per character.
class Raster {
public:
    Raster(int columns, int rows, bool unicode)
        : unicode_(unicode), columns_(columns), rows_(rows), cells_(size_t(columns * rows)) {}
    int across() const { return columns_ * (unicode_ ? 2 : 1); }
    int down() const { return rows_ * (unicode_ ? 4 : 1); }
    void set(int x, int y) {
        constexpr int kBits[4][2] = {{1, 8}, {2, 16}, {4, 32}, {64, 128}};  // of U+2800 + bits
        if (unicode_)
            cells_[size_t(y / 4 * columns_ + x / 2)] |= kBits[y % 4][x % 2];
        else
            cells_[size_t(y * columns_ + x)] = 1;
    }
    std::string line(int row) const {
        std::string text;
        for (int column = 0; column < columns_; column++) {
            const int cell = cells_[size_t(row * columns_ + column)];
            text += cell == 0 ? " " : unicode_ ? utf8(0x2800 + cell) : "*";
        }
        return text;
    }

private:
    bool unicode_;
    int columns_, rows_;
    std::vector<int> cells_;
};

// Appends the fields to the lines, as many per line as fit.
void append_fields(std::vector<std::string>& lines, const std::vector<std::string>& fields, size_t columns) {
    std::string line;
    for (const std::string& field : fields) {
        if (!line.empty() && line.size() + 3 + field.size() > columns) {
            lines.push_back(line);
            line.clear();
        }
        line += (line.empty() ? "" : "   ") + field;
    }
    lines.push_back(line);
}

}  // namespace

std::string with_commas(double value) {
    std::string digits = format("%.0f", value);
    for (int place = int(digits.size()) - 3; place > 0; place -= 3) digits.insert(size_t(place), ",");
    return digits;
}

std::string duration(double seconds) {
    const double minutes = std::floor(seconds / 60), hours = std::floor(minutes / 60);
    if (minutes < 1) return format("%.0f s", seconds);
    if (hours < 1) return format("%.0f min %02.0f s", minutes, std::floor(seconds - minutes * 60));
    return format("%.0f h %02.0f min", hours, minutes - hours * 60);
}

void Curve::add(int step, double value) {
    if (!std::isfinite(value)) return;
    if (means_.empty()) first_step_ = step;
    size_t place;
    while ((place = size_t((step - first_step_) / steps_each_)) >= kMostMeans) {
        for (size_t i = 0; i < means_.size(); i++) {
            const Mean mean = means_[i];
            if (i % 2 == 0)
                means_[i / 2] = mean;
            else
                means_[i / 2] = {means_[i / 2].sum + mean.sum, means_[i / 2].count + mean.count};
        }
        means_.resize((means_.size() + 1) / 2);
        steps_each_ *= 2;
    }
    if (place >= means_.size()) means_.resize(place + 1);
    means_[place].sum += value;
    means_[place].count++;
}

std::vector<double> Curve::resampled(size_t count) const {
    std::vector<double> places, values;
    for (size_t i = 0; i < means_.size(); i++) {
        if (means_[i].count == 0) continue;
        places.push_back(double(i));
        values.push_back(means_[i].sum / means_[i].count);
    }
    if (values.empty()) return {};
    std::vector<double> result(count);
    size_t right = 0;
    for (size_t i = 0; i < count; i++) {
        const double at = count > 1 ? places.back() * double(i) / double(count - 1) : places.back();
        while (right + 1 < places.size() && places[right] < at) right++;
        const size_t left = right > 0 ? right - 1 : 0;
        const double span = places[right] - places[left];
        result[i] =
            span > 0 ? values[left] + (values[right] - values[left]) * (at - places[left]) / span : values[right];
    }
    return result;
}

void ViewState::add(const TrainRecord& record) {
    const double old = last ? 0.9 : 0;
    auto smooth = [&](double& value, double now) { value = old * value + (1 - old) * now; };
    smooth(smoothed_ms, record.step_ms);
    smooth(compute_ms, record.compute_ms());
    smooth(optimizer_ms, record.optimizer_ms);
    smooth(comm_ms, record.comm_ms);
    smooth(data_ms, record.data_ms);
    losses.add(record.step, record.loss);
    last = record;
}

std::vector<std::string> curve_lines(const Curve& curve, int columns, int rows, bool unicode) {
    Raster raster(columns - kLabelColumns, rows, unicode);
    const std::vector<double> values = curve.resampled(size_t(raster.across()));
    double low = 0, high = 0;
    if (!values.empty()) {
        std::vector<double> sorted = values;
        std::ranges::sort(sorted);
        low = sorted.front(), high = sorted[(sorted.size() - 1) * 98 / 100];
    }
    const double range = high > low ? high - low : 1;
    int before = -1;
    for (int x = 0; x < int(values.size()); x++) {
        const double part = std::clamp((high - values[size_t(x)]) / range, 0.0, 1.0);
        const int y = int(std::lround(part * (raster.down() - 1)));
        // Draw dots up to the previous dot's height, so that the line has no gaps.
        const int from = before < 0 || before == y ? y : before < y ? before + 1 : before - 1;
        for (int dot = std::min(from, y); dot <= std::max(from, y); dot++) raster.set(x, dot);
        before = y;
    }
    std::vector<std::string> lines;
    for (int row = 0; row < rows; row++) {
        const bool has_label = !values.empty() && (row == 0 || row == rows - 1);
        const std::string label = has_label ? format("%7.4g", row == 0 ? high : low) : std::string(7, ' ');
        lines.push_back(label + (unicode ? " \u2502" : " |") + raster.line(row));
    }
    return lines;
}

std::vector<std::string> view_lines(const ViewState& state, int total_steps, const std::string& activity, int columns,
                                    int rows, bool unicode) {
    constexpr int kMostTextLines = 7, kTallest = 10;
    const TrainRecord& last = *state.last;
    const int width = std::min(columns - 1, kWidest);
    std::vector<std::string> text;
    std::vector<std::string> fields = {
        format("step %d/%d (%.1f %%)", last.step, total_steps, 100.0 * last.step / total_steps),
        format("epoch %.2f", last.epoch),
        duration(state.remaining_s(total_steps)) + " left",
        format("loss %.4f", last.loss),
    };
    if (state.validation)
        fields.push_back(format("validation %.4f at step %d", state.validation->loss, state.validation->step));
    fields.push_back(format("lr %.2e", last.learning_rate));
    fields.push_back(format("norm %.2f", double(last.grad_norm)));
    fields.push_back(with_commas(last.tokens_per_s) + " tokens/s");
    if (last.mfu) fields.push_back(format("MFU %.1f %%", *last.mfu * 100));
    fields.push_back(format("%.0f ms per step", last.step_ms));
    append_fields(text, fields, size_t(width));
    auto share = [&](double ms) { return state.smoothed_ms > 0 ? 100 * ms / state.smoothed_ms : 0; };
    append_fields(text,
                  {format("time: forward, backward %.0f %%", share(state.compute_ms)),
                   format("optimizer %.0f %%", share(state.optimizer_ms)),
                   format("communication %.0f %%", share(state.comm_ms)), format("data %.0f %%", share(state.data_ms))},
                  size_t(width));
    if (!last.skipped.empty()) text.push_back("skipped: " + last.skipped + " is not finite");
    text.push_back(activity);

    const int curve_rows = std::clamp(rows - kMostTextLines - 2, 3, kTallest);
    std::vector<std::string> lines = curve_lines(state.losses, width, curve_rows, unicode);
    const std::string first = format("step %d", state.losses.first_step()), end = format("%d", last.step);
    const size_t space = size_t(std::max(1, width - kLabelColumns - int(first.size() + end.size())));
    lines.push_back(std::string(kLabelColumns, ' ') + first + std::string(space, ' ') + end);
    lines.insert(lines.end(), text.begin(), text.end());
    for (std::string& line : lines)
        if (line.size() > size_t(width) && line.find('\xe2') == std::string::npos) line.resize(size_t(width));
    if (lines.size() >= size_t(rows)) lines.erase(lines.begin(), lines.end() - (rows - 1));
    return lines;
}
