#include <CLI/App.hpp>
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "commands/command_line.h"
#include "runtime/io/io.h"

namespace {

struct Options {
    std::vector<std::string> runs;
    std::string out;
};

struct Point {
    double step, loss;
};

// What metrics.jsonl says of a run. Steps whose loss is absent or not finite have no point.
struct RunMetrics {
    std::string name;
    std::vector<Point> train, val;  // by step, ascending
    std::vector<double> tokens_per_s;
    int skipped = 0;  // updates
};

double number_or_nan(const nlohmann::ordered_json& record, const char* key) {
    const auto value = record.find(key);
    return value != record.end() && value->is_number() ? value->get<double>() : NAN;
}

void add_record(RunMetrics& metrics, const nlohmann::ordered_json& record, const std::string& origin) {
    if (!record.is_object() || !record.contains("kind") || !record.contains("step") ||
        !record["step"].is_number_unsigned())
        fail(Exit::data, "%s: expected an object with \"kind\" and \"step\"", origin);
    const bool is_train = record["kind"] == "train";
    if (!is_train && record["kind"] != "val") return;
    std::vector<Point>& points = is_train ? metrics.train : metrics.val;
    const Point point{record["step"].get<double>(), number_or_nan(record, "loss")};
    while (!points.empty() && points.back().step >= point.step) points.pop_back();  // the later line counts
    if (std::isfinite(point.loss)) points.push_back(point);
    if (!is_train) return;
    metrics.skipped += record.contains("skipped");
    if (const double speed = number_or_nan(record, "tokens_per_s"); speed > 0) metrics.tokens_per_s.push_back(speed);
}

// Of a run directory. As in RunLog, a line without newline at the end does not count. Fails with Exit::data, naming
// file and line, if a line is no record, or if there is no loss at all.
RunMetrics read_metrics(const std::string& run) {
    RunMetrics metrics;
    metrics.name = run;
    const std::string path = run + "/metrics.jsonl";
    std::istringstream text(read_file(path));
    std::string line;
    for (size_t number = 1; std::getline(text, line) && !text.eof(); number++) {
        const std::string origin = format("line %zu of %s", number, path.c_str());
        add_record(metrics, parse_json(line, origin, Exit::data), origin);
    }
    if (metrics.train.empty()) fail(Exit::data, "%s has no training step with a finite loss", path);
    return metrics;
}

void print_table(const std::vector<RunMetrics>& runs) {
    std::printf("%-32s %8s %10s %10s %10s %8s %12s %8s\n", "run", "step", "training", "validation", "best", "at step",
                "tokens/s", "skipped");
    for (const RunMetrics& run : runs) {
        std::printf("%-32s %8.0f %10.4f", run.name.c_str(), run.train.back().step, run.train.back().loss);
        const auto best = std::ranges::min_element(run.val, {}, &Point::loss);
        if (best != run.val.end())
            std::printf(" %10.4f %10.4f %8.0f", run.val.back().loss, best->loss, best->step);
        else
            std::printf(" %10s %10s %8s", "-", "-", "-");
        std::vector<double> speeds = run.tokens_per_s;
        const auto median = speeds.begin() + ptrdiff_t(speeds.size() / 2);
        std::ranges::nth_element(speeds, median);
        std::printf(" %12.0f %8d\n", speeds.empty() ? 0.0 : *median, run.skipped);
    }
}

// A linear scale from values to pixels.
struct Axis {
    double first_px, last_px;     // of the ticks
    std::vector<double> ticks{};  // at least two, multiples of 1, 2 or 5 times a power of ten; all values are between
    double pixel(double value) const {
        return first_px + (value - ticks.front()) / (ticks.back() - ticks.front()) * (last_px - first_px);
    }
};

Axis axis_over(double low, double high, double smallest_tick, double first_px, double last_px) {
    constexpr double kMostIntervals = 6;
    const double least = std::max({(high - low) / kMostIntervals, smallest_tick, std::abs(high) * 1e-4});
    const double power = std::pow(10.0, std::floor(std::log10(least)));
    const double tick = power * (least <= power ? 1 : least <= 2 * power ? 2 : least <= 5 * power ? 5 : 10);
    Axis axis{first_px, last_px};
    for (double i = std::floor(low / tick); axis.ticks.size() < 2 || axis.ticks.back() < high; i++)
        axis.ticks.push_back(i * tick);
    return axis;
}

// More points than pixels only make the file large: the means of as many neighbours as it takes.
std::vector<Point> thinned(const std::vector<Point>& points) {
    constexpr size_t kMostPoints = 1000;
    const size_t group = (points.size() + kMostPoints - 1) / kMostPoints;
    std::vector<Point> means;
    for (size_t begin = 0; begin < points.size(); begin += group) {
        const size_t end = std::min(begin + group, points.size());
        Point sum{0, 0};
        for (size_t i = begin; i < end; i++) sum = {sum.step + points[i].step, sum.loss + points[i].loss};
        means.push_back({sum.step / double(end - begin), sum.loss / double(end - begin)});
    }
    return means;
}

std::string xml_text(const std::string& text) {
    std::string escaped;
    for (const char c : text) escaped += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
    return escaped;
}

constexpr const char* kHead = R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 450">
<title>Training and validation loss by step</title>
<style>
text { font: 13px sans-serif; fill: #24292f; }
.paper { fill: #ffffff; }
.grid { stroke: #d8dee4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .paper { fill: #0d1117; }
  .grid { stroke: #30363d; }
}
.training, .validation { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.training { stroke-width: 1.2; opacity: 0.6; }
.validation { stroke-width: 2.2; }
</style>
<rect class="paper" width="800" height="450"/>
)";
constexpr double kLeft = 70, kRight = 780, kTop = 20, kBottom = 395, kLegendRow = 18;

std::string loss_svg(const std::vector<RunMetrics>& runs) {
    // Distinct on white and on black.
    constexpr const char* kColors[] = {"#3b82f6", "#ea6c1a", "#16a34a", "#c026d3", "#ca8a04", "#0891b2"};
    std::vector<Point> all;
    for (const RunMetrics& run : runs)
        for (const std::vector<Point>& points : {run.train, run.val})
            all.insert(all.end(), points.begin(), points.end());
    const auto [low, high] = std::ranges::minmax(all, {}, &Point::loss);
    const Axis x = axis_over(0, std::ranges::max(all, {}, &Point::step).step, 1, kLeft, kRight);
    const Axis y = axis_over(low.loss, high.loss, 1e-4, kBottom, kTop);

    std::string svg = kHead;
    auto add_line = [&](double x1, double y1, double x2, double y2, const std::string& look) {
        svg += format("<line x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" %s/>\n", x1, y1, x2, y2, look.c_str());
    };
    auto add_text = [&](double at_x, double at_y, const char* look, const std::string& text) {
        svg += format("<text x=\"%.2f\" y=\"%.2f\" %s>%s</text>\n", at_x, at_y, look, xml_text(text).c_str());
    };
    for (const double step : x.ticks) {
        add_line(x.pixel(step), kTop, x.pixel(step), kBottom, "class=\"grid\"");
        add_text(x.pixel(step), kBottom + 18, "class=\"x\" text-anchor=\"middle\"", format("%.10g", step));
    }
    for (const double loss : y.ticks) {
        add_line(kLeft, y.pixel(loss), kRight, y.pixel(loss), "class=\"grid\"");
        add_text(kLeft - 8, y.pixel(loss) + 4, "class=\"y\" text-anchor=\"end\"", format("%.6g", loss));
    }
    add_text((kLeft + kRight) / 2, kBottom + 40, "text-anchor=\"middle\"", "step");
    add_text(-(kTop + kBottom) / 2, 18, "text-anchor=\"middle\" transform=\"rotate(-90)\"", "loss, nats per token");

    double legend_y = kTop + kLegendRow;
    for (size_t i = 0; i < runs.size(); i++)
        for (const bool is_train : {true, false}) {
            std::vector<Point> points = thinned(is_train ? runs[i].train : runs[i].val);
            if (points.empty()) continue;
            if (points.size() == 1) points.push_back(points[0]);  // a dot
            const char* const kind = is_train ? "training" : "validation";
            const std::string look = format("class=\"%s\" stroke=\"%s\"", kind, kColors[i % std::size(kColors)]);
            svg += "<polyline " + look + " points=\"";
            for (const Point& point : points) svg += format("%.2f,%.2f ", x.pixel(point.step), y.pixel(point.loss));
            svg += "\"/>\n";
            add_line(kRight - 40, legend_y - 4, kRight - 10, legend_y - 4, look);
            add_text(kRight - 48, legend_y, "class=\"legend\" text-anchor=\"end\"", runs[i].name + ", " + kind);
            legend_y += kLegendRow;
        }
    return svg + "</svg>\n";
}

void report(const Options& options) {
    std::vector<RunMetrics> runs;
    for (const std::string& run : options.runs) runs.push_back(read_metrics(run));
    print_table(runs);
    if (!options.out.empty()) write_file_atomically(options.out, loss_svg(runs));
}

}  // namespace

void add_report(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("report", "losses of runs as a table and as curves");
    parser->add_option("RUN", options->runs, "run directories, one or several")->required();
    parser->add_option("--out", options->out, "an SVG file of training and validation loss by step");
    parser->callback([options] { report(*options); });
}
