package figure

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/internal/attn"
)

// Limits of a drawing, far beyond what is legible.
const (
	mostWorkers = 1 << 12
	mostOutputs = 1 << 16
	mostTokens  = 1 << 30 // per context
)

// options are the flags of the schedule command.
type options struct {
	heads, kvHeads, dim, ctx, batch, workers, tile int
	lengths, policies, dtype, svg, json            string
}

// drawSchedules draws the work of each worker in a decode step.
func drawSchedules(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	var o options
	flags.IntVar(&o.heads, "heads", 2, "query `heads`")
	flags.IntVar(&o.kvHeads, "kv-heads", 0, "KV `heads`, of which -heads is a multiple (default: as many)")
	flags.IntVar(&o.dim, "dim", 64, "`elements` of a head")
	flags.IntVar(&o.ctx, "ctx", 1280, "`tokens` of every context")
	flags.IntVar(&o.batch, "batch", 1, "`sequences`, of one new token each")
	flags.StringVar(&o.lengths, "lengths", "", "`tokens` of each context, as 10240,4096,300, instead of -ctx and -batch")
	flags.IntVar(&o.workers, "workers", 5, "`number` of multiprocessors, or threads")
	flags.IntVar(&o.tile, "tile", 0, "`tokens` of a LeanTile (default: 256, and what the engine takes for -policy gpu)")
	flags.StringVar(&o.dtype, "dtype", "f16", "`type` of keys and values: f32, f64, f16, bf16")
	flags.StringVar(&o.policies, "policy", "", "`list` of schedules: "+strings.Join(policyNames, ", ")+"; fixed-split:N is N splits (default: all)")
	flags.StringVar(&o.svg, "svg", "", "`file` to draw them to")
	flags.StringVar(&o.json, "json", "", "`file` to write all pieces of work to")
	return func(stdout, stderr io.Writer) error {
		set := map[string]bool{}
		flags.Visit(func(f *flag.Flag) { set[f.Name] = true })
		p, err := o.problem(set)
		if err != nil {
			return err
		}
		policies, err := parsePolicies(o.policies)
		if err != nil {
			return err
		}
		var all []*schedule
		for _, y := range policies {
			s, err := y.schedule(p)
			switch {
			case err == nil:
				all = append(all, s)
			case set["policy"]:
				return fmt.Errorf("-policy %s: %w", y.name, err)
			default:
				fmt.Fprintf(stderr, "%s is left out: %v\n", y.name, err)
			}
		}
		if err := writeText(stdout, p, all, isTerminal(stdout)); err != nil {
			return err
		}
		if o.svg != "" {
			if err := os.WriteFile(o.svg, drawing(p, all), 0o644); err != nil {
				return err
			}
		}
		if o.json == "" {
			return nil
		}
		text, err := json.MarshalIndent(records(all), "", "\t")
		if err != nil {
			return err
		}
		return os.WriteFile(o.json, append(text, '\n'), 0o644)
	}
}

// record is the JSON form of a schedule.
type record struct {
	*schedule
	Longest   int64   `json:"longest"` // LeanTiles of the busiest worker
	Occupancy float64 `json:"occupancy"`
	Waves     int     `json:"waves"`
	Partials  int     `json:"partials"`
}

func records(all []*schedule) (list []record) {
	for _, s := range all {
		list = append(list, record{s, s.span(), s.occupancy(), s.waves(), s.partials()})
	}
	return list
}

// problem returns the problem that the flags describe. set holds the names of the flags that were given.
func (o *options) problem(set map[string]bool) (*problem, error) {
	if !set["kv-heads"] {
		o.kvHeads = o.heads
	}
	for _, f := range []struct {
		name              string
		value, least, max int
	}{
		{"heads", o.heads, 1, mostOutputs}, {"kv-heads", o.kvHeads, 1, o.heads}, {"dim", o.dim, 1, 1 << 16}, {"ctx", o.ctx, 1, mostTokens},
		{"batch", o.batch, 1, mostOutputs}, {"workers", o.workers, 1, mostWorkers}, {"tile", o.tile, 1, mostTokens},
	} {
		if (set[f.name] || f.name != "tile") && (f.value < f.least || f.value > f.max) {
			return nil, fmt.Errorf("-%s %d: it must be from %d to %d", f.name, f.value, f.least, f.max)
		}
	}
	if o.heads%o.kvHeads != 0 {
		return nil, fmt.Errorf("-kv-heads %d: -heads %d is no multiple of it", o.kvHeads, o.heads)
	}
	p := &problem{heads: o.heads, kvHeads: o.kvHeads, dim: o.dim, workers: o.workers, tile: o.tile}
	var known bool
	if p.dtype, known = map[string]attn.DType{"f32": attn.Float32, "f64": attn.Float64, "f16": attn.Float16, "bf16": attn.BFloat16}[o.dtype]; !known {
		return nil, fmt.Errorf("-dtype %q is none of f32, f64, f16, bf16", o.dtype)
	}
	if err := o.setLengths(p, set); err != nil {
		return nil, err
	}
	if n := len(p.lengths) * p.kvHeads; n > mostOutputs {
		return nil, fmt.Errorf("-kv-heads %d, %d sequences: %d output tiles, and at most %d are drawn", p.kvHeads, len(p.lengths), n, mostOutputs)
	}
	return p, nil
}

// setLengths sets p.lengths from -lengths, or from -ctx and -batch.
func (o *options) setLengths(p *problem, set map[string]bool) error {
	if !set["lengths"] {
		p.lengths = slices.Repeat([]int{o.ctx}, o.batch)
		return nil
	}
	for _, name := range []string{"ctx", "batch"} {
		if set[name] {
			return fmt.Errorf("-%s and -lengths %s: give one of them", name, o.lengths)
		}
	}
	all := 0
	for field := range strings.SplitSeq(o.lengths, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(field))
		if err != nil || n < 0 || n > mostTokens {
			return fmt.Errorf("-lengths %q: %q is no number of tokens from 0 to %d", o.lengths, field, mostTokens)
		}
		p.lengths, all = append(p.lengths, n), max(all, n)
	}
	if all == 0 {
		return fmt.Errorf("-lengths %q: no context has tokens", o.lengths)
	}
	return nil
}

// parsePolicies parses -policy. An empty list means all policies.
func parsePolicies(list string) (all []policy, err error) {
	if list == "" {
		list = strings.Join(policyNames, ",")
	}
	for field := range strings.SplitSeq(list, ",") {
		y := policy{name: strings.TrimSpace(field)}
		name, splits, given := strings.Cut(y.name, ":")
		if given && name == fixedSplit {
			y.name = name
			if y.splits, err = strconv.Atoi(splits); err != nil || y.splits < 1 || y.splits > mostWorkers {
				return nil, fmt.Errorf("-policy %q: %q is no number of splits from 1 to %d", list, splits, mostWorkers)
			}
		}
		if !slices.Contains(policyNames, y.name) {
			return nil, fmt.Errorf("-policy %q: %q is none of %s", list, y.name, strings.Join(policyNames, ", "))
		}
		all = append(all, y)
	}
	return all, nil
}

// isTerminal reports whether w is a terminal and colours are allowed. NO_COLOR (no-color.org) turns colours
// off.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
