// Package measure has turns, figures, bars and reports: what all measurements share.
package measure

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// Figure is one number of a report.
type Figure struct {
	Table     string  `json:"table"`
	Case      string  `json:"case"`      // the row's shape
	Contender string  `json:"contender"` // and who computed it
	Metric    Metric  `json:"metric"`
	Value     float64 `json:"value"`
	Bar       *Bar    `json:"bar,omitempty"`
}

// ReadCeiling is who reads what ours does and no more; on a GPU the name goes on with how.
const ReadCeiling = "read ceiling"

// Metric is the name and unit of a number, and the head of its column.
type Metric string

const (
	Speed         Metric = "GB/s"                // bytes of keys and values, over the median of the rounds
	BestSpeed     Metric = "best GB/s"           // over the best round
	Share         Metric = "of the ceiling"      // median of the ratios of neighbouring turns
	OverStock     Metric = "x default"           // the same, of the default node's time to ours
	OverTorch     Metric = "x PyTorch"           // of PyTorch's time to ours
	Allocs        Metric = "allocs"              // heap allocations of a step
	Tokens        Metric = "tokens/s"            // of all sequences together, median
	BestTokens    Metric = "best tokens/s"       // in the best round
	Prompt        Metric = "prompt tokens/s"     // before the first token, median
	PromptMillis  Metric = "ms"                  // until the tokens behind the prompts are there, median
	FirstPrompt   Metric = "ms, the first time"  // with kernels to load and memory to take
	OverHF        Metric = "x transformers"      // of transformers' time to ours; on a CPU of float32
	OverHF16      Metric = "x transformers bf16" // on a CPU
	OverCT2       Metric = "x CT2"               // of CTranslate2's float32 time to ours
	OverInt8      Metric = "x CT2 int8"          // of CTranslate2's int8 time to ours
	Micros        Metric = "us"                  // of a launch, median of all replays
	Micros10      Metric = "p10 us"              // that a tenth of them are below
	Micros90      Metric = "p90 us"              // and nine tenths
	GPUShare      Metric = "of the read ceiling" // share, on a GPU
	OfDense       Metric = "of contiguous"       // of the speed with contiguous keys
	OfAllowed     Metric = "of the time"         // that is allowed: 1.05 times the ceiling's, and 5 us
	TimeOfMHA     Metric = "time of MHA"         // over that of one query head a KV head
	TFLOPs        Metric = "TFLOP/s"             // of products, over the median of the rounds
	Products      Metric = "Gop/s"               // of products, over the best round
	OverCUDNN     Metric = "x CUDNN"             // of PyTorch's CUDNN_ATTENTION's time to ours
	OverCuBLAS    Metric = "x cuBLAS"            // of cuBLAS's time to ours
	OfSum         Metric = "of the allowed time" // of a mixed step: 1.05 times the longer of its two parts, and 20% of the other
	OverFlash     Metric = "x FLASH"             // of PyTorch's FLASH_ATTENTION's time to ours
	OverBest      Metric = "x best peer"         // of the best peer's
	OverBatch     Metric = "x BatchAttention"    // of FlashInfer's BatchAttention's
	StepMillis    Metric = "ms a step"           // of all sequences together, median
	StepBytes     Metric = "GB a step"           // of weights, keys and values
	OverCompiled  Metric = "x compiled"          // of the time of transformers' compiled step to ours
	OverEager     Metric = "x eager"             // and of its eager one
	OverFixed     Metric = "x fixed"             // speed over that of our own with the schedule of FlashDecoding
	OverPerHead   Metric = "x per head"          // and with that of FlashAttention-2
	OverInfer     Metric = "x FlashInfer"        // of the better of FlashInfer's decode kernels
	OverVarlen    Metric = "x FLASH, varlen"     // of FLASH_ATTENTION's for sequences of several lengths
	BusyShare     Metric = "busy SMs"            // share of multiprocessors' time in which they have LeanTiles, by the schedule
	BusyCounted   Metric = "busy SMs, counted"   // in which they have a warp, by the GPU's counters
	Watts         Metric = "W"                   // of the whole GPU
	TokenJoules   Metric = "mJ a token"          // of each sequence, in a layer
	ByteJoules    Metric = "mJ/GB"               // of keys and values
	OfFlashJoules Metric = "of FLASH's energy"
	OfReadJoules  Metric = "x the ceiling's energy" // of a kernel that only reads the same bytes
	TotalSeconds  Metric = "s in all"               // a prompt and its tokens
	OverDefault   Metric = "x default"              // and with attention in three launches
	Queueing      Metric = "queueing attention"     // share of the time, on the host
	LayerMicros   Metric = "us a layer"
	BeyondKernels Metric = "beyond its kernels"      // us a layer
	BeyondFloor   Metric = "beyond the driver alone" // us a layer
	OverOneGPU    Metric = "x one GPU"               // of one GPU's time to that of several
	OverBytes     Metric = "x one GPU by its bytes"  // of the time in which one GPU reads what a step does
	BeyondShare   Metric = "us beyond an even share" // of one GPU's time: what a layer takes more than that
	OverCopies    Metric = "x copies"                // of the time of sequences that have nothing in common to that of forks
	OfReader      Metric = "of a reader of the same pages"
)

func (m Metric) Format(v float64) string {
	switch m {
	case Share:
		return fmt.Sprintf("%.0f%%", 100*v)
	case GPUShare, OfDense, OfReader, OfAllowed, OfSum, TimeOfMHA, Queueing, BusyShare, BusyCounted:
		return fmt.Sprintf("%.1f%%", 100*v)
	case Allocs:
		return fmt.Sprintf("%.0f", v)
	case Speed, BestSpeed, TFLOPs, Micros, Micros10, Micros90, LayerMicros, BeyondKernels, BeyondFloor, BeyondShare, Tokens, BestTokens, ByteJoules:
		return fmt.Sprintf("%.1f", v)
	case StepMillis:
		return fmt.Sprintf("%.3f", v)
	case Prompt, Watts, "splits", "shapes", "slower":
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// Bar is what a figure should be.
type Bar struct {
	Least *float64 `json:"least,omitempty"`
	Most  *float64 `json:"most,omitempty"`
	Met   bool     `json:"met"`
}

func AtLeast(v float64) *Bar { return &Bar{Least: &v} }
func AtMost(v float64) *Bar  { return &Bar{Most: &v} }

// OfCeiling is a bar for a share. What is far above the ceiling shows that the
// ceiling was not reached by its own kernel: such a run has measured nothing.
func OfCeiling(least float64) *Bar {
	most := 1.15
	return &Bar{Least: &least, Most: &most}
}

// Judge returns b with its verdict on v.
func (b *Bar) Judge(v float64) *Bar {
	if b == nil {
		return nil
	}
	// Written so that a NaN meets nothing.
	met := (b.Least == nil || v >= *b.Least) && (b.Most == nil || v <= *b.Most)
	return &Bar{b.Least, b.Most, met}
}

func (b *Bar) Text(m Metric) string {
	var limits []string
	if b.Least != nil {
		limits = append(limits, ">= "+m.Format(*b.Least))
	}
	if b.Most != nil {
		limits = append(limits, "<= "+m.Format(*b.Most))
	}
	s := strings.Join(limits, " and ")
	return s + ": " + Verdict(b.Met)
}

func Verdict(met bool) string {
	if met {
		return "met"
	}
	return "**missed**"
}

// Report collects what a command measures.
type Report struct {
	Command string `json:"command"` // of leanbench, or a whole command line of another program
	Date    string `json:"date,omitempty"`
	Commit  string `json:"commit,omitempty"` // of this repository

	// Transcribed says where figures were copied from that no JSON was kept of.
	Transcribed string `json:"transcribed,omitempty"`

	Machine Machine  `json:"machine"`
	Notes   []string `json:"notes,omitempty"` // what else the figures depend on

	// Versions are those of the programs that were measured, and of the driver, by name.
	Versions map[string]string `json:"versions,omitempty"`
	Clocks   []Clock           `json:"clocks,omitempty"`

	Figures []Figure `json:"figures"`
}

// Clock is a GPU's clocks while it reads memory, in MHz.
type Clock struct {
	When   string `json:"when"`
	SM     int    `json:"sm"`
	Memory int    `json:"memory"`
}

// Row is the figures of one contender in one case.
type Row struct {
	report          *Report
	table, is, name string
}

func (r *Report) Row(table, is, contender string) Row { return Row{r, table, is, contender} }

// Add takes a figure down; b may be nil.
func (r Row) Add(m Metric, v float64, b *Bar) {
	r.report.Figures = append(r.report.Figures, Figure{r.table, r.is, r.name, m, v, b.Judge(v)})
}

// Drop drops the figures of a case, which is measured again.
func (r *Report) Drop(table, is string) {
	r.Figures = slices.DeleteFunc(r.Figures, func(f Figure) bool { return f.Table == table && f.Case == is })
}

// Find returns a figure; nil if there is none.
func (r *Report) Find(is, contender string, m Metric) *Figure {
	for i := range r.Figures {
		if f := &r.Figures[i]; f.Case == is && f.Contender == contender && f.Metric == m {
			return f
		}
	}
	return nil
}

// WriteTable writes the figures of a table in Markdown: a row for each case and
// contender and a column for each metric, in the order in which they came.
func (r *Report) WriteTable(w io.Writer, table string) {
	type key struct{ is, contender string }
	var rows []key
	var columns []Metric
	cells := map[key]map[Metric]string{}
	for _, f := range r.Figures {
		if f.Table != table {
			continue
		}
		k := key{f.Case, f.Contender}
		if cells[k] == nil {
			rows = append(rows, k)
			cells[k] = map[Metric]string{}
		}
		if !slices.Contains(columns, f.Metric) {
			columns = append(columns, f.Metric)
		}
		text := f.Metric.Format(f.Value)
		if f.Bar != nil {
			text += " (" + f.Bar.Text(f.Metric) + ")"
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

// WriteHead writes what the figures were measured on.
func (r *Report) WriteHead(w io.Writer) {
	fmt.Fprintf(w, "%s\n", strings.Join(append([]string{"`leanbench " + r.Command + "`", r.Machine.String()}, r.Notes...), "; "))
}

// WriteVerdict counts the bars and lists those that are missed.
func (r *Report) WriteVerdict(w io.Writer) {
	bars, missed := 0, []Figure(nil)
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
		is, _, _ := strings.Cut(f.Bar.Text(f.Metric), ":")
		fmt.Fprintf(w, "- %s: %s %s, and the bar is %s\n", strings.Join(where, "; "), f.Metric.Format(f.Value), f.Metric, is)
	}
}

// Save writes the report as JSON, if a name is given.
func (r *Report) Save(name string) error {
	if name == "" {
		return nil
	}
	if r.Date == "" {
		r.Date = time.Now().UTC().Format(time.DateOnly)
	}
	if info, ok := debug.ReadBuildInfo(); ok && r.Commit == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				r.Commit = s.Value
			}
		}
	}
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(data, '\n'), 0o666)
}

// Load reads a report that Save wrote.
func Load(name string) (*Report, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	r := new(Report)
	in := json.NewDecoder(bytes.NewReader(data))
	in.DisallowUnknownFields()
	if err := in.Decode(r); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if _, err := in.Token(); err != io.EOF {
		return nil, fmt.Errorf("%s: there is something behind the report", name)
	}
	return r, nil
}

// HasCase says whether there are figures of a case.
func (r *Report) HasCase(table, is string) bool {
	return slices.ContainsFunc(r.Figures, func(f Figure) bool { return f.Table == table && f.Case == is })
}
