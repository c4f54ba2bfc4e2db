package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/internal/plural"
)

// A text is cut into windows of the model's positions, a stride apart; the last window ends with the text. In each
// window the model reads all tokens, and predicts those that no earlier window has, except the first token of the
// text. The perplexity is
//
//	exp(-1/n * sum over these tokens of log p(token | those before it in its window))
//
// With a stride of a whole window, windows are adjacent, and the first token of each is not predicted. transformers'
// page on the perplexity of models of a fixed length computes the same; its sliding windows weigh their means by one
// token too few, and here each token has the same weight.

// window is tokens begin to end of a text, of which those from first on are predicted.
type window struct{ begin, first, end int }

// windows cuts a text.
func windows(tokens, size, stride int) (ws []window) {
	for begin, seen := 0, 0; seen < tokens; begin += stride {
		end := min(begin+size, tokens)
		if first := max(seen, begin+1); first < end {
			ws = append(ws, window{begin, first, end})
		}
		seen = end
	}
	return ws
}

// tellPerplexity loads the model and writes the perplexity of a text.
func tellPerplexity(ctx context.Context, o options, stdout, stderr io.Writer) (err error) {
	l, err := load(o, stderr)
	if err != nil {
		return err
	}
	defer func() { err = l.end(err) }()
	ids, err := l.encode(o.text, true, math.MaxInt32)
	if err != nil {
		return err
	}
	p := perplexity{size: l.config.MaxPositions, stride: o.stride, text: ids}
	switch {
	case p.stride > p.size:
		return usagef("-stride %d is more than the model's %d positions: there would be tokens between the windows", p.stride, p.size)
	case p.stride == 0:
		p.stride = p.size
	}
	p.windows = windows(len(p.text), p.size, p.stride)
	if len(p.windows) == 0 {
		return errors.New(plural.Mend(fmt.Sprintf("the text has %d tokens in windows of %d: none has another one before it", len(p.text), p.size)))
	}
	mo := model.Options{Capacity: []int{min(p.size, len(p.text))}, AllLogits: true}
	if err := l.build(mo, stderr); err != nil {
		return err
	}
	for _, w := range p.windows {
		p.read.total += w.end - w.begin
	}
	p.read.w, p.read.what, p.read.live, p.read.began = stderr, "text", isTerminal(stderr), time.Now()
	err = p.run(ctx, l)
	p.read.end()
	if p.tokens == 0 || err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	if err == nil {
		err = l.measureExchange()
	}
	result := p.result()
	if o.json {
		report := l.newReport()
		report.Perplexity = &result
		if e := report.write(stdout); e != nil {
			return e
		}
	} else if e := result.write(stdout); e != nil {
		return e
	}
	if o.stats {
		if e := l.writeStats(stderr); err == nil {
			err = e
		}
	}
	return err
}

// perplexity is the state of reading a text.
type perplexity struct {
	text         []int
	size, stride int
	windows      []window
	read         progress

	begun, tokens int
	sum           float64 // of -log p
}

// run reads all windows, in chunks of the decoder, so that memory need not hold the logits of a whole window. Without
// a cache each chunk would read the whole window again.
func (p *perplexity) run(ctx context.Context, l *loaded) error {
	d, chunk, width := l.decoder, l.decoder.Chunk(), l.config.VocabSize
	if l.options.attention == model.Fused {
		chunk = p.size
	}
	for _, w := range p.windows {
		if err := d.Truncate(0, 0); err != nil {
			return err
		}
		p.begun++
		for at := w.begin; at < w.end; {
			n := min(chunk, w.end-at)
			if err := d.Prefill(ctx, [][]int{p.text[at : at+n]}, nil); err != nil {
				return err
			}
			logits := d.PromptLogits(0)
			for i := range n {
				if next := at + i + 1; next >= w.first && next < w.end {
					row := logits[i*width : (i+1)*width]
					p.sum += logSumExp(row) - float64(row[p.text[next]])
					p.tokens++
				}
			}
			if math.IsNaN(p.sum) {
				return fmt.Errorf("the logits behind one of tokens %d to %d of the text are NaN or infinite%s", at, at+n-1, l.hint())
			}
			at += n
			p.read.show(n, false)
		}
	}
	return nil
}

// result returns the perplexity of the tokens read.
func (p *perplexity) result() perplexityJSON {
	all := 0
	for _, w := range p.windows {
		all += w.end - w.first
	}
	value := math.Exp(p.sum / float64(p.tokens))
	return perplexityJSON{
		Value: min(value, math.MaxFloat64), Tokens: p.tokens, Of: len(p.text),
		Windows: p.begun, Window: p.size, Stride: p.stride, Complete: p.tokens == all,
	}
}

func (r *perplexityJSON) write(w io.Writer) error {
	state := ""
	if !r.Complete {
		state = ", interrupted"
	}
	text := fmt.Sprintf("perplexity %.6f of %d of %d tokens, in %d windows of up to %d%s\n", r.Value, r.Tokens, r.Of, r.Windows, r.Window, state)
	_, err := io.WriteString(w, plural.Mend(text))
	return err
}
