// What the block on the terminal looks like: text from numbers, without a terminal.
#pragma once

#include "runtime/logging/logging.h"

// The course of a number over any number of steps in bounded memory: means of equally many successive steps.
class Curve {
public:
    // Steps ascend. What is not finite leaves no trace.
    void add(int step, double value);
    // `count` values at equal distances from the first step to the last, interpolated between the means; none without
    // a step.
    std::vector<double> resampled(size_t count) const;
    int first_step() const { return first_step_; }

private:
    struct Mean {
        double sum = 0, count = 0;
    };
    int first_step_ = 0, steps_each_ = 1;
    std::vector<Mean> means_;
};

// What is known of the run so far.
struct ViewState {
    std::optional<TrainRecord> last;
    std::optional<ValRecord> validation;
    Curve losses;
    double smoothed_ms = 0;                                             // of a step
    double compute_ms = 0, optimizer_ms = 0, comm_ms = 0, data_ms = 0;  // of it, smoothed in the same way

    void add(const TrainRecord& record);
    double remaining_s(int total_steps) const { return last ? (total_steps - last->step) * smoothed_ms / 1000 : 0; }
};

// The picture of a curve, `rows` lines of `columns` characters with the range of its values at the left; values above
// all but the highest 2 % are drawn at the top. Braille dots, or asterisks without `unicode`.
std::vector<std::string> curve_lines(const Curve& curve, int columns, int rows, bool unicode);

// The block for a terminal of this size: the curve and the numbers of the last step, then `activity`. No line is wider
// than the terminal, and there are fewer than its rows. Requires fits_view() and a step.
std::vector<std::string> view_lines(const ViewState& state, int total_steps, const std::string& activity, int columns,
                                    int rows, bool unicode);
inline bool fits_view(int columns, int rows) { return columns >= 50 && rows >= 13; }

// "12,345" and "1 min 21 s"
std::string with_commas(double value);
std::string duration(double seconds);
