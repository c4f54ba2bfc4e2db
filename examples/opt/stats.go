package main

import (
	"fmt"
	"io"
	"time"

	"gorgonia.org/leanattention/examples/opt/model"
)

// firstToken is the parts of the time until the first token of a cold start.
type firstToken struct{ load, build, prompt time.Duration }

func (t *firstToken) write(w io.Writer) {
	fmt.Fprintf(w, "first    token after %.3f s: %.3f loading, %.3f for graphs and copies of weights, %.3f for a prompt\n",
		(t.load + t.build + t.prompt).Seconds(), t.load.Seconds(), t.build.Seconds(), t.prompt.Seconds())
}

// writeStats writes the work done.
func (l *loaded) writeStats(w io.Writer) error {
	l.first.write(w)
	if seed := l.options.seed(); seed != nil {
		fmt.Fprintf(w, "seed     %d: -seed %d makes the same texts again\n", *seed, *seed)
	}
	writeStats(w, l.decoder.Stats())
	if l.options.draft {
		writeDrafts(w, l.decoder.Stats())
	}
	err := writeReads(w, l.decoder)
	l.writeMemory(w)
	l.writeExchange(w)
	return err
}

// writeExchange writes how long GPUs, or ranks, take for their sums.
func (l *loaded) writeExchange(w io.Writer) {
	x := l.exchange
	if x.Sums == 0 {
		return
	}
	fmt.Fprintf(w, "exchange %d sums of %.1f KB a run of decode, which take %.3f ms by themselves", x.Sums, float64(x.Bytes)/1e3, 1e3*x.Time.Seconds())
	if p := l.decoder.Stats().Decode; p.Passes > 0 {
		fmt.Fprintf(w, ": %.1f%% of a run", 100*float64(x.Time)*float64(p.Passes)/float64(p.Time))
	}
	fmt.Fprintln(w)
}

// measureExchange is called on all ranks after the same work, and not after an interrupt.
func (l *loaded) measureExchange() (err error) {
	// Ranks always measure: one rank alone may have -stats or -json.
	if l.options.stats || l.options.json || l.comm != nil {
		l.exchange, err = l.decoder.MeasureExchange()
	}
	return err
}

// writeMemory writes the used memory of each GPU.
func (l *loaded) writeMemory(w io.Writer) {
	all := l.gpu.Members()
	for i, g := range all {
		m, err := l.gpu.Memory(i)
		if err != nil {
			return
		}
		of := "the GPU"
		if len(all) > 1 {
			of = fmt.Sprintf("GPU %d", g.Ordinal)
		}
		fmt.Fprintf(w, "memory   %d MB of %s used here, %d of %d MB free\n", m.Used>>20, of, m.Free>>20, m.Total>>20)
	}
}

func writeStats(w io.Writer, s model.Stats) {
	if s.Device != "" {
		fmt.Fprintf(w, "device   %s\n", s.Device)
	}
	for _, p := range []struct {
		name string
		model.Phase
	}{{"prefill", s.Prefill}, {"decode", s.Decode}} {
		if p.Tokens == 0 {
			fmt.Fprintf(w, "%-7s  no tokens\n", p.name)
			continue
		}
		seconds := p.Time.Seconds()
		fmt.Fprintf(w, "%-7s  %d tokens in %.3f s: %.1f tokens/s, %.3f ms a token, attention %.1f%%",
			p.name, p.Tokens, seconds, float64(p.Tokens)/seconds, 1e3*seconds/float64(p.Tokens), 100*p.Attention.Seconds()/seconds)
		fmt.Fprintf(w, " (%d runs of the graph, %.3f ms each", p.Passes, 1e3*seconds/float64(p.Passes))
		if p.Passes > 1 {
			fmt.Fprintf(w, ", the first %.3f", 1e3*p.First.Seconds())
		}
		fmt.Fprintln(w, ")")
	}
}

// writeDrafts writes the results of drafts.
func writeDrafts(w io.Writer, s model.Stats) {
	fmt.Fprintf(w, "drafts   %d of %d guessed tokens accepted, in %d of %d runs; %.2f tokens a run\n",
		s.Draft.Accepted, s.Draft.Tokens, s.Draft.Passes, s.Decode.Passes, float64(s.Decode.Tokens)/float64(max(s.Decode.Passes, 1)))
}

// writeReads writes decode's share of the memory's bandwidth.
func writeReads(w io.Writer, d *model.Decoder) error {
	p := d.Stats().Decode
	if p.Bytes == 0 {
		return nil
	}
	speed := float64(p.Bytes) / p.Time.Seconds()
	fmt.Fprintf(w, "reads    %.1f MB a run of decode, %.1f GB/s", float64(p.Bytes)/float64(p.Passes)/1e6, speed/1e9)
	ceiling, err := d.ReadCeiling()
	if ceiling > 0 {
		fmt.Fprintf(w, ": %.1f%% of the %.1f GB/s of their memory", 100*speed/ceiling, ceiling/1e9)
	}
	fmt.Fprintln(w)
	return err
}
