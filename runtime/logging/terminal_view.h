// The layout of the block on the terminal: text from numbers, independent of any terminal.
#pragma once

#include "runtime/logging/logging.h"

// A curve of a number over any number of steps in bounded memory: means over groups of successive steps, all of one
// size.
class Curve {
public:
    // Requires ascending steps. Ignores non-finite values.
    void add(int step, double value);
    // Returns `count` values at equal distances from the first step to the last, interpolated between the means; an
    // empty vector if there is no step.
    std::vector<double> resampled(size_t count) const;
    int first_step() const { return first_step_; }

private:
    struct Mean {
        double sum = 0, count = 0;
    };
    int first_step_ = 0, steps_each_ = 1;
    std::vector<Mean> means_;
};

// The run's data so far.
struct ViewState {
    std::optional<TrainRecord> last;
    std::optional<ValRecord> validation;
    Curve losses;
    double smoothed_ms = 0;                                             // of a step
    double compute_ms = 0, optimizer_ms = 0, comm_ms = 0, data_ms = 0;  // of smoothed_ms, smoothed alike

    void add(const TrainRecord& record);
    double remaining_s(int total_steps) const { return last ? (total_steps - last->step) * smoothed_ms / 1000 : 0; }
};

// Draws a curve in `rows` lines of `columns` characters, with the range of its values at the left. The highest 2 % of
// the values are drawn at the top. Uses braille dots, or asterisks without `unicode`.
std::vector<std::string> curve_lines(const Curve& curve, int columns, int rows, bool unicode);

// Returns the block for a terminal of this size: the curve and the numbers of the last step, then `activity`. Every
// line fits the terminal's width, and there are fewer lines than rows. Requires fits_view() and a step.
std::vector<std::string> view_lines(const ViewState& state, int total_steps, const std::string& activity, int columns,
                                    int rows, bool unicode);
inline bool fits_view(int columns, int rows) { return columns >= 50 && rows >= 13; }

// "12,345" and "1 min 21 s"
std::string with_commas(double value);
std::string duration(double seconds);
