package cpu

import (
	"gorgonia.org/leanattention/cmd/leanbench/measure"

	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
)

//go:embed attention.py
var attentionWorker string

// measurePeers measures attention against PyTorch.
var measurePeers = againstTorch("peers", attentionWorker, (*attentionBench).peers)

// againstTorch returns the setup of a command that measures against a PyTorch worker.
func againstTorch(command, script string, run func(*attentionBench, *measure.Worker) error) func(*flag.FlagSet) func(stdout, stderr io.Writer) error {
	return func(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
		o := measure.Flags(flags)
		python := flags.String("python", "", "`path` of a python that has PyTorch; peers/setup.sh makes one and prints it")
		return func(stdout, stderr io.Writer) (err error) {
			if *python == "" {
				return errors.New("-python is needed: peers/setup.sh makes one and prints its path")
			}
			b, err := newBench(command, o, stdout, stderr)
			if err != nil {
				return err
			}
			w, err := measure.StartWorker(*python, script, fmt.Sprint(o.Workers))
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, w.Close()) }()
			b.report.Notes = []string{strings.Join(w.Hello, " ")}
			return run(b, w)
		}
	}
}

const tableTorch = "One query a head, against scaled_dot_product_attention"

// peerCases returns contexts of 1k to 64k keys with 12 to 32 heads. faster is the bar of the speedup over
// PyTorch.
func peerCases() (cases []one) {
	for _, s := range measure.Storages {
		for _, c := range []struct {
			heads, kvHeads, keys, dim int
			inCache                   bool
		}{
			{12, 12, 1024, 64, true},
			{12, 12, 1024, 64, false},
			{12, 12, 65536, 64, false},
			{16, 16, 16384, 128, false},
			{32, 32, 4096, 64, false},
			{32, 32, 16384, 64, false},
			{32, 32, 16384, 128, false},
			{32, 8, 4096, 128, false},
			{32, 8, 16384, 64, false},
			{32, 8, 65536, 128, false},
		} {
			shape := decodeShape{c.heads, c.kvHeads, c.keys, c.dim, s}
			cases = append(cases, one{table: tableTorch, shape: shape, inCache: c.inCache, faster: torchBar(shape, c.inCache)})
		}
	}
	return cases
}

// torchBar returns the bar of the speedup over PyTorch. Grouped queries have a bar in float32 only.
func torchBar(s decodeShape, inCache bool) *measure.Bar {
	grouped := s.heads != s.kvHeads
	switch {
	case s.storage == measure.StoreF32 && grouped:
		return measure.AtLeast(4)
	case grouped:
		return nil
	case s.storage == measure.StoreF16:
		return measure.AtLeast(2.2)
	case s.storage == measure.StoreBF16:
		return measure.AtLeast(7)
	case inCache:
		return measure.AtLeast(1)
	}
	return measure.AtLeast(1.4)
}

func (b *attentionBench) peers(w *measure.Worker) error {
	b.report.WriteHead(b.stdout)
	for _, c := range peerCases() {
		fmt.Fprintln(b.stderr, c.shape)
		if err := b.measurePeer(w, c); err != nil {
			return fmt.Errorf("%s: %w", c.shape, err)
		}
		if err := b.report.Save(b.json); err != nil {
			return err
		}
	}
	b.report.WriteTable(b.stdout, tableTorch)
	b.report.WriteVerdict(b.stdout)
	return nil
}

func (b *attentionBench) measurePeer(w *measure.Worker, c one) error {
	sets, q := b.operands(c), newQuery(c.shape, b.rng)
	s := c.shape
	if _, err := w.Ask("shape %d %d %d %d %s %d", s.heads, s.kvHeads, s.keys, s.dim, s.storage.Name, len(sets)); err != nil {
		return err
	}
	torch := func(name, way string) measure.Contender {
		return measure.Contender{Name: name, Run: w.Steps("run %s", way), Settle: measure.TorchSettle}
	}
	contenders := []measure.Contender{ceiling(sets), attend(s, q, sets).Contender, torch("PyTorch", "sdpa")}
	if s.heads != s.kvHeads {
		contenders = append(contenders, torch("PyTorch, groups packed by hand", "packed"))
	}
	all, err := measure.Alternate(b.pace, contenders)
	if err != nil {
		return err
	}
	is := s.String()
	if c.inCache {
		is += ", in cache"
	}
	for i, t := range all {
		r := b.report.Row(c.table, is, contenders[i].Name)
		bytes := float64(s.bytes())
		r.Add(measure.Speed, bytes/t.Median()/1e9, nil)
		r.Add(measure.BestSpeed, bytes/t.Best()/1e9, nil)
		if i > 0 {
			r.Add(measure.Share, t.Faster(all[0]), nil)
		}
		if i == 1 {
			r.Add(measure.OverTorch, t.Faster(all[2]), c.faster)
		}
	}
	return nil
}
