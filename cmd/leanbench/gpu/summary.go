package gpu

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Tables that docs/benchmarks.md shows of a sweep besides those of single shapes.
const (
	tableByTime = "Against PyTorch, by the time of our launch"
	tableMemory = "Of the memory's speed"
	tablePages  = "Pages"
)

// summary is a report of what docs/benchmarks.md shows of a measurement of all shapes:
// the figures of single shapes that tables and pictures have, and what they come to.
func (t gpuTables) summary(r *measure.Report) *measure.Report {
	s := &measure.Report{Command: r.Command, Date: r.Date, Commit: r.Commit, Machine: r.Machine, Notes: r.Notes, Figures: []measure.Figure{}}
	even := t.cases(append(namedCases(), sweepCases()...))
	sumPeers(s, even)
	sumMemory(s, even)
	for _, pages := range []int{16, 64} {
		sumPages(s, even, pages)
	}
	for _, c := range t.cases(namedCases()) {
		row := s.Row(tableNamed, c.shape.String(), ours)
		keep(row, c, measure.Micros, c.micros)
		keep(row, c, measure.GPUShare, c.share)
		keep(row, c, measure.OverFlash, c.flash)
		keep(row, c, measure.OverBest, measure.AtLeast(1))
		for _, n := range c.pages {
			keepOf(s, c, pageName(n), measure.OfDense, c.paged)
		}
	}
	for _, c := range t.cases(raggedCases()) {
		keepOf(s, c, measure.ReadCeiling, measure.Micros, nil)
		for _, n := range c.pages {
			keepOf(s, c, pageName(n), measure.Micros, nil)
			keepOf(s, c, pageName(n), measure.GPUShare, nil)
			keepOf(s, c, pageName(n), measure.OfAllowed, c.ragged)
		}
	}
	for _, c := range t.cases(groupCases()) {
		keepOf(s, c, ours, measure.Micros, nil)
		keepOf(s, c, ours, measure.GPUShare, nil)
		for _, n := range c.groups {
			keepOf(s, c, groupName(n), measure.Micros, nil)
			keepOf(s, c, groupName(n), measure.GPUShare, nil)
			keepOf(s, c, groupName(n), measure.TimeOfMHA, c.grouped)
		}
	}
	for _, c := range even { // the pictures have those that have names, too
		row := s.Row(tableSweep, c.shape.String(), ours)
		keep(row, c, measure.Micros, nil)
		keep(row, c, measure.GPUShare, nil)
		keep(row, c, measure.OverBest, nil)
	}
	return s
}

// keep takes down a figure of ours, if it was measured.
func keep(row measure.Row, c measuredCase, m measure.Metric, b *measure.Bar) {
	if v := c.of(ours, m); !math.IsNaN(v) {
		row.Add(m, v, b)
	}
}

func keepOf(s *measure.Report, c measuredCase, who string, m measure.Metric, b *measure.Bar) {
	if v := c.of(who, m); !math.IsNaN(v) {
		s.Row(c.table, c.shape.String(), who).Add(m, v, b)
	}
}

// sumPeers has the shapes by the time of our launch, and all of them.
func sumPeers(s *measure.Report, cases []measuredCase) {
	over := func(c measuredCase) float64 { return c.of(ours, measure.OverBest) }
	flash := func(c measuredCase) float64 { return c.of(ours, measure.OverFlash) }
	add := func(name string, cases []measuredCase, mean, least *measure.Bar) {
		x, f := measured(cases, over), measured(cases, flash)
		if len(x) == 0 {
			return
		}
		row := s.Row(tableByTime, name, ours)
		row.Add("shapes", float64(len(x)), nil)
		row.Add("x best peer, geometric mean", geometricMean(x), mean)
		row.Add("x best peer, least", x[0], least)
		if len(f) > 0 {
			row.Add("x FLASH, geometric mean", geometricMean(f), nil)
			row.Add("x FLASH, least", f[0], nil)
		}
	}
	for _, span := range intervals(7, 15, 30, 70, 300) {
		add(span.us(), where(cases, func(c measuredCase) bool { return span.has(c.us(ours)) }), nil, nil)
	}
	add("all", cases, measure.AtLeast(leastMean), measure.AtLeast(1))
}

// us is the interval with its unit.
func (s interval) us() string {
	if math.IsInf(s[1], 1) {
		return fmt.Sprintf("%g us and more", s[0])
	}
	return s.String() + " us"
}

// sumMemory has what is so long that only memory counts, and the longest single head.
func sumMemory(s *measure.Report, cases []measuredCase) {
	shareOf := func(c measuredCase) float64 { return c.of(ours, measure.GPUShare) }
	add := func(name string, cases []measuredCase, b *measure.Bar) {
		x := measured(cases, shareOf)
		if len(x) == 0 {
			return
		}
		row := s.Row(tableMemory, name, ours)
		row.Add("shapes", float64(len(x)), nil)
		if b != nil {
			reach := where(cases, func(c measuredCase) bool { return c.share.Judge(shareOf(c)).Met })
			row.Add("reach the bar", float64(len(reach)), nil)
		}
		row.Add("of the read ceiling, least", x[0], b)
		row.Add("of the read ceiling, median", measure.Median(x), nil)
		row.Add("of the read ceiling, most", x[len(x)-1], nil)
	}
	long := func(grouped bool) []measuredCase {
		return where(cases, func(c measuredCase) bool {
			return c.shape.Bytes() >= longBytes && (c.shape.heads != c.shape.kvHeads) == grouped
		})
	}
	add("a query head a KV head, 300 MB and more", long(false), measure.OfCeiling(0.98))
	add("groups of query heads, 300 MB and more", long(true), nil)
	add("one head, 1048576 keys of 64", where(cases, func(c measuredCase) bool { return c.shape.heads == 1 }), measure.OfCeiling(0.90))
}

// sumPages has what pages of some tokens cost, by the time of the contiguous launch.
func sumPages(s *measure.Report, cases []measuredCase, pages int) {
	ofContiguous := func(c measuredCase) float64 { return c.of(pageName(pages), measure.OfDense) }
	add := func(name string, cases []measuredCase, b *measure.Bar) {
		x := measured(cases, ofContiguous)
		if len(x) == 0 {
			return
		}
		row := s.Row(tablePages, name, fmt.Sprintf("pages of %d", pages))
		row.Add("shapes", float64(len(x)), nil)
		reach := where(cases, func(c measuredCase) bool { return c.paged.Judge(ofContiguous(c)).Met })
		row.Add("reach 97%", float64(len(reach)), nil)
		row.Add("of contiguous, median", measure.Median(x), nil)
		row.Add("of contiguous, least", x[0], b)
		if reader := measured(cases, func(c measuredCase) float64 { return c.of(readerName(pages), measure.GPUShare) }); len(reader) > 0 {
			row.Add("a reader of the same pages, of the ceiling", measure.Median(reader), nil)
		}
	}
	for _, dim := range []int{64, 128} {
		these := where(cases, func(c measuredCase) bool { return c.shape.dim == dim })
		for _, span := range intervals(6, 9, 11, 17, 70) {
			add(fmt.Sprintf("heads of %d, %s", dim, span), where(these, func(c measuredCase) bool { return span.has(c.us(ours)) }), measure.AtLeast(0.97))
		}
		add(fmt.Sprintf("heads of %d, all", dim), these, nil)
	}
}
