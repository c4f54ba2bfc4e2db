package gpu

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// writeTables writes what the documentation shows of a measurement of the whole
// sweep, which has a few thousand figures and may have been made in parts.
func writeTables(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	var names []string
	flags.Func("from", "`file` that leanbench gpu -json wrote; once for each part", func(name string) error {
		names = append(names, name)
		return nil
	})
	to := flags.String("json", "", "`file` to write what docs/benchmarks.md shows of it to, as docs/benchmarks/gpu.json")
	return func(stdout, _ io.Writer) error {
		if len(names) == 0 {
			return errors.New("no -from: there is nothing to write tables of")
		}
		var all *measure.Report
		for _, name := range names {
			r, err := measure.Load(name)
			if err != nil {
				return err
			}
			if all == nil {
				all = r
			} else {
				all.Figures = append(all.Figures, r.Figures...)
			}
		}
		t, err := gpuMeasured(all.Figures)
		if err != nil {
			return err
		}
		t.write(stdout)
		if *to == "" {
			return nil
		}
		return t.summary(all).Save(*to)
	}
}

// gpuFigures are those of one case. The read ceiling is called so whatever its kernel.
type gpuFigures map[string]map[measure.Metric]float64

func (f gpuFigures) us(contender string) float64 { return f.of(contender, measure.Micros) }

// of is NaN where nothing was measured.
func (f gpuFigures) of(contender string, m measure.Metric) float64 {
	if v, ok := f[contender][m]; ok {
		return v
	}
	return math.NaN()
}

// gpuTables are the cases that were measured, by the name of a table and a shape.
type gpuTables map[[2]string]gpuFigures

func gpuMeasured(figures []measure.Figure) (gpuTables, error) {
	t := make(gpuTables)
	for _, f := range figures {
		if f.Case == "" { // the mean of a part
			continue
		}
		k, who := [2]string{f.Table, f.Case}, f.Contender
		if strings.HasPrefix(who, measure.ReadCeiling) {
			who = measure.ReadCeiling
		}
		if t[k] == nil {
			t[k] = make(gpuFigures)
		}
		if t[k][who] == nil {
			t[k][who] = make(map[measure.Metric]float64)
		}
		if _, twice := t[k][who][f.Metric]; twice {
			return nil, fmt.Errorf("%s, %s: %s has two figures of %q: the files are no parts of one measurement", f.Table, f.Case, who, f.Metric)
		}
		t[k][who][f.Metric] = f.Value
	}
	return t, nil
}

// measuredCase is a case and what was measured of it.
type measuredCase struct {
	gpuCase
	gpuFigures
}

// cases are those of some that were measured, with contiguous keys and values where
// they are not ragged.
func (t gpuTables) cases(some []gpuCase) (there []measuredCase) {
	for _, c := range some {
		if f := t[[2]string{c.table, c.shape.String()}]; f != nil && (c.shape.name != "" || !math.IsNaN(f.us(ours))) {
			there = append(there, measuredCase{c, f})
		}
	}
	return there
}

func (t gpuTables) write(w io.Writer) {
	even := t.cases(append(namedCases(), sweepCases()...))
	writePeers(w, even)
	writeLong(w, even)
	for _, pages := range []int{16, 64} {
		writePages(w, even, pages)
	}
	writeNamed(w, t.cases(namedCases()))
	writeRagged(w, t.cases(raggedCases()))
	writeGroups(w, t.cases(groupCases()))
	for _, dim := range []int{64, 128} {
		writeGrid(w, even, dim)
	}
}

// interval is a range of times, or of anything else: from the first to below the second.
type interval [2]float64

func (s interval) has(v float64) bool { return v >= s[0] && v < s[1] }

func (s interval) String() string {
	switch {
	case s[0] == 0:
		return fmt.Sprintf("below %g", s[1])
	case math.IsInf(s[1], 1):
		return fmt.Sprintf("%g and more", s[0])
	}
	return fmt.Sprintf("%g to %g", s[0], s[1])
}

// intervals are those between limits, and at both ends.
func intervals(limits ...float64) (all []interval) {
	last := 0.0
	for _, l := range append(limits, math.Inf(1)) {
		all, last = append(all, interval{last, l}), l
	}
	return all
}

// measured are the values of some cases, without those that were not measured.
func measured(cases []measuredCase, of func(measuredCase) float64) (x []float64) {
	for _, c := range cases {
		if v := of(c); !math.IsNaN(v) {
			x = append(x, v)
		}
	}
	slices.Sort(x)
	return x
}

func where[T any](all []T, keep func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(all), func(x T) bool { return !keep(x) })
}

// writeColumns writes the head of a table.
func writeColumns(w io.Writer, columns ...string) {
	fmt.Fprintf(w, "\n| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
}

func writePeers(w io.Writer, cases []measuredCase) {
	over := func(c measuredCase) float64 { return c.of(ours, measure.OverBest) }
	flash := func(c measuredCase) float64 { return c.of(ours, measure.OverFlash) }
	all, flashes := measured(cases, over), measured(cases, flash)
	if len(all) == 0 {
		return
	}
	mean := geometricMean(all)
	fmt.Fprintf(w, "\nAgainst other kernels, over %d shapes: %.3f times as fast as the best of them in the geometric mean (bar %.2f: %s), at least %.3f (bar 1.00: %s)", len(all), mean, leastMean, measure.Verdict(mean >= leastMean), all[0], measure.Verdict(all[0] >= 1))
	if len(flashes) > 0 {
		fmt.Fprintf(w, "; %.2f times as fast as FLASH_ATTENTION, at least %.3f", geometricMean(flashes), flashes[0])
	}
	fmt.Fprintln(w, ".")
	columns, spans := []string{"us of our launch"}, intervals(7, 15, 30, 70, 300)
	for _, s := range spans {
		columns = append(columns, s.String())
	}
	writeColumns(w, columns...)
	for _, line := range []struct {
		title string
		of    func(x []float64) string
	}{
		{"shapes", func(x []float64) string { return fmt.Sprint(len(x)) }},
		{"x the best, geometric mean", func(x []float64) string { return fmt.Sprintf("%.3f", geometricMean(x)) }},
		{"least", func(x []float64) string { return fmt.Sprintf("%.3f", x[0]) }},
	} {
		fmt.Fprintf(w, "| %s |", line.title)
		for _, s := range spans {
			text := ""
			if x := measured(where(cases, func(c measuredCase) bool { return s.has(c.us(ours)) }), over); len(x) > 0 {
				text = line.of(x)
			}
			fmt.Fprintf(w, " %s |", text)
		}
		fmt.Fprintln(w)
	}
}

func writeLong(w io.Writer, cases []measuredCase) {
	fmt.Fprintln(w)
	for _, grouped := range []bool{false, true} {
		long := where(cases, func(c measuredCase) bool {
			return c.shape.Bytes() >= longBytes && (c.shape.heads != c.shape.kvHeads) == grouped
		})
		shareOf := func(c measuredCase) float64 { return c.of(ours, measure.GPUShare) }
		x := measured(long, shareOf)
		if len(x) == 0 {
			continue
		}
		what, bars := "with groups of query heads", ""
		if !grouped {
			reach := len(where(long, func(c measuredCase) bool { return c.share.Judge(shareOf(c)).Met }))
			what, bars = "of MHA", fmt.Sprintf(" (bar 98%%: %s, %d of %d)", measure.Verdict(reach == len(x)), reach, len(x))
		}
		fmt.Fprintf(w, "%d shapes %s of 300 MB and more: %.1f%% to %.1f%% of the ceiling, median %.1f%%%s.\n", len(x), what, 100*x[0], 100*x[len(x)-1], 100*measure.Median(x), bars)
	}
}

func writePages(w io.Writer, cases []measuredCase, pages int) {
	writeColumns(w, fmt.Sprintf("pages of %d, of contiguous: us of the contiguous launch", pages), "shapes", "reach 97%", "median", "least", "a reader of the same pages, of the ceiling")
	ofContiguous := func(c measuredCase) float64 { return c.of(pageName(pages), measure.OfDense) }
	line := func(title string, cases []measuredCase) {
		x := measured(cases, ofContiguous)
		if len(x) == 0 {
			return
		}
		reader := measured(cases, func(c measuredCase) float64 { return c.of(readerName(pages), measure.GPUShare) })
		text := ""
		if len(reader) > 0 {
			text = fmt.Sprintf("%.1f%%", 100*measure.Median(reader))
		}
		reach := where(cases, func(c measuredCase) bool { return c.paged.Judge(ofContiguous(c)).Met })
		fmt.Fprintf(w, "| %s | %d | %d | %.1f%% | %.1f%% | %s |\n", title, len(x), len(reach), 100*measure.Median(x), 100*x[0], text)
	}
	for _, dim := range []int{64, 128} {
		these := where(cases, func(c measuredCase) bool { return c.shape.dim == dim })
		for _, s := range intervals(6, 9, 11, 17, 70) {
			line(fmt.Sprintf("heads of %d, %s", dim, s), where(these, func(c measuredCase) bool { return s.has(c.us(ours)) }))
		}
		line(fmt.Sprintf("heads of %d, all", dim), these)
	}
}

// percent is a share as a table has it; nothing where it was not measured.
func percent(format string, v float64) string {
	if math.IsNaN(v) {
		return ""
	}
	return fmt.Sprintf(format+"%%", 100*v)
}

func times(v float64) string {
	if math.IsNaN(v) {
		return ""
	}
	return fmt.Sprintf("%.2f", v)
}

func writeNamed(w io.Writer, cases []measuredCase) {
	if len(cases) == 0 {
		return
	}
	writeColumns(w, "batch, heads x context x d (float16)", "us", "of the read ceiling", "x FLASH_ATTENTION", "x the best", "pages of 16 of contiguous", "pages of 64", "its bar")
	for _, c := range cases {
		var bars []string
		add := func(b *measure.Bar, what string, v float64) {
			if b != nil {
				bars = append(bars, what+": "+measure.Verdict(b.Judge(v).Met))
			}
		}
		if c.flash != nil {
			add(c.flash, fmt.Sprintf("FLASH x %.1f", *c.flash.Least), c.of(ours, measure.OverFlash))
		}
		if c.micros != nil {
			add(c.micros, fmt.Sprintf("%g us", *c.micros.Most), c.us(ours))
		}
		if c.share != nil {
			add(c.share, fmt.Sprintf("%.0f%% of the ceiling", 100**c.share.Least), c.of(ours, measure.GPUShare))
		}
		fmt.Fprintf(w, "| %s | %.2f | %s | %s | %s | %s | %s | %s |\n", c.shape, c.us(ours), percent("%.1f", c.of(ours, measure.GPUShare)), times(c.of(ours, measure.OverFlash)), times(c.of(ours, measure.OverBest)), percent("%.1f", c.of(pageName(16), measure.OfDense)), percent("%.1f", c.of(pageName(64), measure.OfDense)), strings.Join(bars, "; "))
	}
}

func writeRagged(w io.Writer, cases []measuredCase) {
	if len(cases) == 0 {
		return
	}
	columns := []string{"lengths, heads of d", "read ceiling, us"}
	for _, n := range cases[0].pages {
		columns = append(columns, fmt.Sprintf("pages of %d, us", n), "of the ceiling", "of 1.05 x ceiling + 5 us")
	}
	writeColumns(w, columns...)
	for _, c := range cases {
		fmt.Fprintf(w, "| %s | %.1f |", c.shape, c.us(measure.ReadCeiling))
		for _, n := range c.pages {
			who := pageName(n)
			allowed := c.of(who, measure.OfAllowed)
			fmt.Fprintf(w, " %.1f | %s | %s: %s |", c.us(who), percent("%.1f", c.of(who, measure.GPUShare)), percent("%.1f", allowed), measure.Verdict(c.ragged.Judge(allowed).Met))
		}
		fmt.Fprintln(w)
	}
}

func writeGroups(w io.Writer, cases []measuredCase) {
	for i, c := range cases {
		if i == 0 {
			columns := []string{"the same keys and values, query heads a KV head", "1"}
			for _, n := range c.groups {
				columns = append(columns, fmt.Sprint(n))
			}
			writeColumns(w, columns...)
		}
		us, share, over := fmt.Sprintf("| %s, us | %.1f |", c.shape, c.us(ours)), fmt.Sprintf("| of the read ceiling | %s |", percent("%.1f", c.of(ours, measure.GPUShare))), "| time of one head's | |"
		for _, n := range c.groups {
			who := groupName(n)
			of := c.of(who, measure.TimeOfMHA)
			us += fmt.Sprintf(" %.1f |", c.us(who))
			share += fmt.Sprintf(" %s |", percent("%.1f", c.of(who, measure.GPUShare)))
			over += fmt.Sprintf(" %s: %s |", percent("%.1f", of), measure.Verdict(c.grouped.Judge(of).Met))
		}
		fmt.Fprintf(w, "%s\n%s\n%s\n", us, share, over)
	}
}

// writeGrid has a row for each batch and heads and a column for each context of the sweep.
func writeGrid(w io.Writer, cases []measuredCase, dim int) {
	// rowOf is a shape without its context and head dim.
	rowOf := func(c gpuCase) string {
		row, _, _ := strings.Cut(c.shape.String(), " heads")
		return row
	}
	var rows []string
	var contexts []int
	for _, c := range slices.Concat(sweepCases(), namedCases()) {
		n := c.shape.lengths[0]
		if there := slices.Contains(contexts, n); !there && c.table == tableSweep {
			contexts = append(contexts, n)
		} else if !there {
			continue // a named one that is not of the sweep
		}
		if !slices.Contains(rows, rowOf(c)) {
			rows = append(rows, rowOf(c))
		}
	}
	cells := make(map[string]map[int]string)
	for _, c := range cases {
		if c.shape.dim != dim {
			continue
		}
		row := rowOf(c.gpuCase)
		if cells[row] == nil {
			cells[row] = make(map[int]string)
		}
		parts := where([]string{digits(c.us(ours)), percent("%.0f", c.of(ours, measure.GPUShare)), times(c.of(ours, measure.OverBest))}, func(s string) bool { return s != "" })
		cells[row][c.shape.lengths[0]] = strings.Join(parts, ", ")
	}
	if len(cells) == 0 {
		return
	}
	fmt.Fprintf(w, "\nHeads of %d:\n", dim)
	columns := []string{"batch, heads"}
	for _, n := range contexts {
		columns = append(columns, fmt.Sprint(n))
	}
	writeColumns(w, columns...)
	for _, row := range rows {
		if cells[row] == nil {
			continue
		}
		fmt.Fprintf(w, "| %s |", row)
		for _, n := range contexts {
			fmt.Fprintf(w, " %s |", cells[row][n])
		}
		fmt.Fprintln(w)
	}
}

// digits is a number to three of them.
func digits(v float64) string {
	behind := func(v float64) int { return 2 - int(math.Floor(math.Log10(v))) } // the point
	scale := math.Pow10(behind(v))
	v = math.Round(v*scale) / scale // 9.996 is 10.0
	return fmt.Sprintf("%.*f", max(0, behind(v)), v)
}
