package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// figure is one number of a report.
type figure struct {
	Table     string  `json:"table"`
	Case      string  `json:"case"`      // the row's shape
	Contender string  `json:"contender"` // and who computed it
	Metric    metric  `json:"metric"`
	Value     float64 `json:"value"`
	Bar       *bar    `json:"bar,omitempty"`
}

// readCeiling is who reads what ours does and no more; on a GPU the name goes on with how.
const readCeiling = "read ceiling"

// metric is the name and unit of a number, and the head of its column.
type metric string

const (
	speed         metric = "GB/s"                // bytes of keys and values, over the median of the rounds
	bestSpeed     metric = "best GB/s"           // over the best round
	share         metric = "of the ceiling"      // median of the ratios of neighbouring turns
	overStock     metric = "x default"           // the same, of the default node's time to ours
	overTorch     metric = "x PyTorch"           // of PyTorch's time to ours
	allocs        metric = "allocs"              // heap allocations of a step
	tokens        metric = "tokens/s"            // of all sequences together, median
	bestTokens    metric = "best tokens/s"       // in the best round
	prompt        metric = "prompt tokens/s"     // before the first token, median
	overHF        metric = "x transformers"      // of transformers' float32 time to ours
	overCT2       metric = "x CT2"               // of CTranslate2's float32 time to ours
	overInt8      metric = "x CT2 int8"          // of CTranslate2's int8 time to ours
	micros        metric = "us"                  // of a launch, median of all replays
	micros10      metric = "p10 us"              // that a tenth of them are below
	micros90      metric = "p90 us"              // and nine tenths
	gpuShare      metric = "of the read ceiling" // share, on a GPU
	ofDense       metric = "of contiguous"       // of the speed with contiguous keys
	ofAllowed     metric = "of the time"         // that is allowed: 1.05 times the ceiling's, and 5 us
	timeOfMHA     metric = "time of MHA"         // over that of one query head a KV head
	overFlash     metric = "x FLASH"             // of PyTorch's FLASH_ATTENTION's time to ours
	overBest      metric = "x best peer"         // of the best peer's
	overBatch     metric = "x BatchAttention"    // of FlashInfer's BatchAttention's
	stepMillis    metric = "ms a step"           // of all sequences together, median
	stepBytes     metric = "GB a step"           // of weights, keys and values
	overCompiled  metric = "x compiled"          // of the time of transformers' compiled step to ours
	overEager     metric = "x eager"             // and of its eager one
	overFixed     metric = "x fixed"             // speed over that of our decoder with the schedule of FlashDecoding
	overDefault   metric = "x default"           // and with attention in three launches
	queueing      metric = "queueing attention"  // share of the time, on the host
	layerMicros   metric = "us a layer"
	beyondKernels metric = "beyond its kernels"      // us a layer
	beyondFloor   metric = "beyond the driver alone" // us a layer
	ofReader      metric = "of a reader of the same pages"
)

func (m metric) format(v float64) string {
	switch m {
	case share:
		return fmt.Sprintf("%.0f%%", 100*v)
	case gpuShare, ofDense, ofReader, ofAllowed, timeOfMHA, queueing:
		return fmt.Sprintf("%.1f%%", 100*v)
	case allocs:
		return fmt.Sprintf("%.0f", v)
	case speed, bestSpeed, micros, micros10, micros90, layerMicros, beyondKernels, beyondFloor, tokens, bestTokens:
		return fmt.Sprintf("%.1f", v)
	case stepMillis:
		return fmt.Sprintf("%.3f", v)
	case prompt:
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// bar is what a figure should be.
type bar struct {
	Least *float64 `json:"least,omitempty"`
	Most  *float64 `json:"most,omitempty"`
	Met   bool     `json:"met"`
}

func atLeast(v float64) *bar { return &bar{Least: &v} }
func atMost(v float64) *bar  { return &bar{Most: &v} }

// ofCeiling is a bar for a share. What is far above the ceiling shows that the
// ceiling was not reached by its own kernel: such a run has measured nothing.
func ofCeiling(least float64) *bar {
	most := 1.15
	return &bar{Least: &least, Most: &most}
}

// judge returns b with its verdict on v.
func (b *bar) judge(v float64) *bar {
	if b == nil {
		return nil
	}
	// Written so that a NaN meets nothing.
	met := (b.Least == nil || v >= *b.Least) && (b.Most == nil || v <= *b.Most)
	return &bar{b.Least, b.Most, met}
}

func (b *bar) text(m metric) string {
	var limits []string
	if b.Least != nil {
		limits = append(limits, ">= "+m.format(*b.Least))
	}
	if b.Most != nil {
		limits = append(limits, "<= "+m.format(*b.Most))
	}
	s := strings.Join(limits, " and ")
	return s + ": " + verdict(b.Met)
}

func verdict(met bool) string {
	if met {
		return "met"
	}
	return "**missed**"
}

// report collects what a command measures.
type report struct {
	Command string   `json:"command"`
	Machine machine  `json:"machine"`
	Notes   []string `json:"notes,omitempty"` // what else the figures depend on
	Figures []figure `json:"figures"`
}

// row is the figures of one contender in one case.
type row struct {
	report          *report
	table, is, name string
}

func (r *report) row(table, is, contender string) row { return row{r, table, is, contender} }

// add takes a figure down; b may be nil.
func (r row) add(m metric, v float64, b *bar) {
	r.report.Figures = append(r.report.Figures, figure{r.table, r.is, r.name, m, v, b.judge(v)})
}

// writeTable writes the figures of a table in Markdown: a row for each case and
// contender and a column for each metric, in the order in which they came.
func (r *report) writeTable(w io.Writer, table string) {
	type key struct{ is, contender string }
	var rows []key
	var columns []metric
	cells := map[key]map[metric]string{}
	for _, f := range r.Figures {
		if f.Table != table {
			continue
		}
		k := key{f.Case, f.Contender}
		if cells[k] == nil {
			rows = append(rows, k)
			cells[k] = map[metric]string{}
		}
		if !slices.Contains(columns, f.Metric) {
			columns = append(columns, f.Metric)
		}
		text := f.Metric.format(f.Value)
		if f.Bar != nil {
			text += " (" + f.Bar.text(f.Metric) + ")"
		}
		cells[k][f.Metric] = text
	}
	fmt.Fprintf(w, "\n### %s\n\n| | |", table)
	for _, c := range columns {
		fmt.Fprintf(w, " %s |", c)
	}
	fmt.Fprintf(w, "\n|---|---|%s\n", strings.Repeat("---|", len(columns)))
	last := ""
	for _, k := range rows {
		is := k.is
		if is == last {
			is = "" // once for its contenders
		}
		last = k.is
		fmt.Fprintf(w, "| %s | %s |", is, k.contender)
		for _, c := range columns {
			fmt.Fprintf(w, " %s |", cells[k][c])
		}
		fmt.Fprintln(w)
	}
}

// writeHead writes what the figures were measured on.
func (r *report) writeHead(w io.Writer) {
	fmt.Fprintf(w, "%s\n", strings.Join(append([]string{"`leanbench " + r.Command + "`", r.Machine.String()}, r.Notes...), "; "))
}

// writeVerdict counts the bars and lists those that are missed.
func (r *report) writeVerdict(w io.Writer) {
	bars, missed := 0, []figure(nil)
	for _, f := range r.Figures {
		if f.Bar == nil {
			continue
		}
		if bars++; !f.Bar.Met {
			missed = append(missed, f)
		}
	}
	if bars == 0 {
		fmt.Fprintln(w, "\nNone of these figures has a bar.")
		return
	}
	fmt.Fprintf(w, "\nBars met: %d of %d.", bars-len(missed), bars)
	if len(missed) > 0 {
		fmt.Fprint(w, " Missed:")
	}
	fmt.Fprintln(w)
	for _, f := range missed {
		where := slices.DeleteFunc([]string{f.Table, f.Case, f.Contender}, func(s string) bool { return s == "" })
		is, _, _ := strings.Cut(f.Bar.text(f.Metric), ":")
		fmt.Fprintf(w, "- %s: %s %s, and the bar is %s\n", strings.Join(where, "; "), f.Metric.format(f.Value), f.Metric, is)
	}
}

// save writes the report as JSON, if a name is given.
func (r *report) save(name string) error {
	if name == "" {
		return nil
	}
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(data, '\n'), 0o666)
}
