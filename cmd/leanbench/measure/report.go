// Package measure holds the parts that all measurements share: alternating runs, figures, bars and reports.
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
	Case      string  `json:"case"`      // shape
	Contender string  `json:"contender"` // program that computed the case
	Metric    Metric  `json:"metric"`
	Value     float64 `json:"value"`
	Bar       *Bar    `json:"bar,omitempty"`
}

// ReadCeiling names the contender that only reads the bytes that attention reads. On a GPU the kind of read
// follows the name.
const ReadCeiling = "read ceiling"

// Metric is the name and unit of a number, and the head of its table column.
type Metric string

const (
	Speed          Metric = "GB/s"                // bytes of keys and values over the median time of the rounds
	BestSpeed      Metric = "best GB/s"           // over the best round
	Share          Metric = "of the ceiling"      // speed over the ceiling's: median of the ratios of neighbouring turns
	OverStock      Metric = "x default"           // speedup over the default node: the same median
	OverTorch      Metric = "x PyTorch"           // speedup over PyTorch
	Allocs         Metric = "allocs"              // heap allocations per step
	Tokens         Metric = "tokens/s"            // of all sequences together, median
	BestTokens     Metric = "best tokens/s"       // of all sequences together, best round
	Prompt         Metric = "prompt tokens/s"     // tokens of the prompts over the time to the first token, median
	PromptMillis   Metric = "ms"                  // time to the first token after the prompts, median
	FirstPrompt    Metric = "ms, the first time"  // includes loading of kernels and allocation of memory
	OverHF         Metric = "x transformers"      // speedup over transformers; on a CPU, over transformers in float32
	OverHF16       Metric = "x transformers bf16" // on a CPU
	OverCT2        Metric = "x CT2"               // speedup over CTranslate2 in float32
	OverInt8       Metric = "x CT2 int8"          // speedup over CTranslate2 in int8
	Micros         Metric = "us"                  // per launch, median of all replays
	Micros10       Metric = "p10 us"              // 10th percentile
	Micros90       Metric = "p90 us"              // 90th percentile
	GPUShare       Metric = "of the read ceiling" // Share, on a GPU
	OfDense        Metric = "of contiguous"       // speed over the speed with contiguous keys
	OfAllowed      Metric = "of the time"         // time over the allowed time, 1.05 times the ceiling's time plus 5 us
	TimeOfMHA      Metric = "time of MHA"         // time over the time with one query head per KV head
	TFLOPs         Metric = "TFLOP/s"             // of matrix products, over the median of the rounds
	Products       Metric = "Gop/s"               // of matrix products, over the best round
	OverCUDNN      Metric = "x CUDNN"             // speedup over PyTorch's CUDNN_ATTENTION
	OverCuBLAS     Metric = "x cuBLAS"            // speedup over cuBLAS
	OfSum          Metric = "of the allowed time" // of a mixed step, with the allowed time 1.05 times the longer of its two parts plus 20% of the other part
	OverFlash      Metric = "x FLASH"             // speedup over PyTorch's FLASH_ATTENTION
	OverBest       Metric = "x best peer"         // speedup over the best peer
	OverBatch      Metric = "x BatchAttention"    // speedup over FlashInfer's BatchAttention
	StepMillis     Metric = "ms a step"           // of all sequences together, median
	StepBytes      Metric = "GB a step"           // weights, keys and values
	OverCompiled   Metric = "x compiled"          // speedup over the compiled step of transformers
	OverEager      Metric = "x eager"             // speedup over the eager step of transformers
	OverFixed      Metric = "x fixed"             // speedup over leanattention with FlashDecoding's schedule
	OverPerHead    Metric = "x per head"          // speedup over leanattention with FlashAttention-2's schedule
	OverInfer      Metric = "x FlashInfer"        // speedup over the better of FlashInfer's decode kernels
	OverVarlen     Metric = "x FLASH, varlen"     // speedup over FLASH_ATTENTION for sequences of different lengths
	BusyShare      Metric = "busy SMs"            // share of the multiprocessors' time that the schedule fills with LeanTiles
	BusyCounted    Metric = "busy SMs, counted"   // share of the multiprocessors' time with a resident warp, from the GPU's counters
	Watts          Metric = "W"                   // whole GPU
	TokenJoules    Metric = "mJ a token"          // per sequence and layer
	ByteJoules     Metric = "mJ/GB"               // of keys and values
	OfFlashJoules  Metric = "of FLASH's energy"
	OfReadJoules   Metric = "x the ceiling's energy" // over the energy of a kernel that only reads the same bytes
	TotalSeconds   Metric = "s in all"               // a prompt and the tokens after the prompt
	OverDefault    Metric = "x default"              // speedup over attention in three launches
	Queueing       Metric = "queueing attention"     // share of the step's time that the host spends on queueing attention
	LayerMicros    Metric = "us a layer"
	BeyondKernels  Metric = "beyond its kernels"      // us per layer
	BeyondFloor    Metric = "beyond the driver alone" // us per layer
	OverOneGPU     Metric = "x one GPU"               // speedup of several GPUs over one GPU
	OverBytes      Metric = "x one GPU by its bytes"  // speedup over the time in which one GPU reads the bytes of a step
	BeyondShare    Metric = "us beyond an even share" // per layer: time minus one GPU's time divided by the number of GPUs
	OverCopies     Metric = "x copies"                // speedup of forks over sequences that share nothing
	OfReader       Metric = "of a reader of the same pages"
	OverOneProcess Metric = "x one process" // speedup of several processes over one of them
	RelativeError  Metric = "relative error"
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
	case StepMillis, RelativeError:
		return fmt.Sprintf("%.3f", v)
	case Prompt, Watts, "splits", "shapes", "slower":
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// Bar is the target of a figure.
type Bar struct {
	Least *float64 `json:"least,omitempty"`
	Most  *float64 `json:"most,omitempty"`
	Met   bool     `json:"met"`
}

func AtLeast(v float64) *Bar { return &Bar{Least: &v} }
func AtMost(v float64) *Bar  { return &Bar{Most: &v} }

// OfCeiling returns the bar for a share of the ceiling. The upper limit of 1.15 rejects a run whose ceiling
// kernel was itself too slow.
func OfCeiling(least float64) *Bar {
	most := 1.15
	return &Bar{Least: &least, Most: &most}
}

// Judge returns a copy of b with its verdict on v.
func (b *Bar) Judge(v float64) *Bar {
	if b == nil {
		return nil
	}
	// This form of the condition also rejects NaN.
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

// Report collects the figures of a command.
type Report struct {
	Command string `json:"command"` // arguments of leanbench, or the whole command line of another program
	Date    string `json:"date,omitempty"`
	Commit  string `json:"commit,omitempty"` // of this repository

	// Transcribed names the source of figures that were copied because no JSON was kept.
	Transcribed string `json:"transcribed,omitempty"`

	Machine Machine  `json:"machine"`
	Notes   []string `json:"notes,omitempty"` // other conditions of the measurement

	// Versions maps the names of the measured programs and of the driver to their versions.
	Versions map[string]string `json:"versions,omitempty"`
	Clocks   []Clock           `json:"clocks,omitempty"`

	Figures []Figure `json:"figures"`
}

// Clock is the state of a GPU's clocks during memory reads, in MHz.
type Clock struct {
	When   string `json:"when"`
	SM     int    `json:"sm"`
	Memory int    `json:"memory"`
}

// Row adds figures of one contender in one case.
type Row struct {
	report          *Report
	table, is, name string
}

func (r *Report) Row(table, is, contender string) Row { return Row{r, table, is, contender} }

// Add appends a figure. b may be nil.
func (r Row) Add(m Metric, v float64, b *Bar) {
	r.report.Figures = append(r.report.Figures, Figure{r.table, r.is, r.name, m, v, b.Judge(v)})
}

// Drop removes the figures of a case before the case is measured again.
func (r *Report) Drop(table, is string) {
	r.Figures = slices.DeleteFunc(r.Figures, func(f Figure) bool { return f.Table == table && f.Case == is })
}

// Find returns a figure, or nil if there is none.
func (r *Report) Find(is, contender string, m Metric) *Figure {
	for i := range r.Figures {
		if f := &r.Figures[i]; f.Case == is && f.Contender == contender && f.Metric == m {
			return f
		}
	}
	return nil
}

// WriteTable writes the figures of a table in Markdown: a row per case and contender, a column per metric, in
// the order in which the figures were added.
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
			is = "" // printed once per case
		}
		last = k.is
		fmt.Fprintf(w, "| %s | %s |", is, k.contender)
		for _, c := range columns {
			fmt.Fprintf(w, " %s |", cells[k][c])
		}
		fmt.Fprintln(w)
	}
}

// WriteHead writes the command, the machine and the notes.
func (r *Report) WriteHead(w io.Writer) {
	fmt.Fprintf(w, "%s\n", strings.Join(append([]string{"`leanbench " + r.Command + "`", r.Machine.String()}, r.Notes...), "; "))
}

// WriteVerdict writes how many bars are met and lists each missed bar.
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

// Save writes the report as JSON. It does nothing if name is empty.
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

// HasCase reports whether the table has figures of a case.
func (r *Report) HasCase(table, is string) bool {
	return slices.ContainsFunc(r.Figures, func(f Figure) bool { return f.Table == table && f.Case == is })
}
