package figure

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"gorgonia.org/leanattention/internal/plural"
)

// columns is the maximum width of the text.
const columns = 80

// writeText draws the schedules as text at the same scale, with a summary of each. A letter stands for an
// output tile: upper case in the piece with the first LeanTile, lower case in the other pieces.
func writeText(w io.Writer, p *problem, all []*schedule, colours bool) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\n", p)
	label := len(fmt.Sprint(p.workers-1)) + 1
	tokens := scale(all, columns-label)
	fmt.Fprintf(&b, "A letter is an output tile, large where its first LeanTile is and small in other\nparts. Dots are idle. A column is %d tokens.\n", tokens)
	for _, s := range all {
		fmt.Fprintf(&b, "\n%s\n", s.heading())
		end := s.span() * int64(s.Tile)
		for i, pieces := range s.Workers {
			fmt.Fprintf(&b, "%*d %s\n", label-1, i, paint(row(s, pieces, tokens, end), colours))
		}
	}
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "schedule\ttile\tLeanTiles\tlongest\toccupancy\twaves\tpartials\tworkspace\t")
	for _, s := range all {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%.1f%%\t%d\t%d\t%s\t\n", s.Name, s.Tile, s.busy(), s.span(), 100*s.occupancy(), s.waves(), s.partials(), bytesOf(s.Workspace))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := w.Write(b.Bytes())
	return err
}

// String describes the problem.
func (p *problem) String() string {
	var b strings.Builder
	if p.heads != p.kvHeads {
		fmt.Fprintf(&b, "%d/%d heads", p.heads, p.kvHeads)
	} else {
		fmt.Fprintf(&b, "%d heads", p.heads)
	}
	least, most := p.lengths[0], p.lengths[0]
	for _, n := range p.lengths {
		least, most = min(least, n), max(most, n)
	}
	fmt.Fprintf(&b, " of %d, ", p.dim)
	if least < most {
		fmt.Fprintf(&b, "%d contexts of %d to %d tokens", len(p.lengths), least, most)
	} else {
		fmt.Fprintf(&b, "%d x %d tokens", len(p.lengths), most)
	}
	fmt.Fprintf(&b, ", %v, %d workers", p.dtype, p.workers)
	return plural.Mend(b.String())
}

func (s *schedule) heading() string { return s.title + ": " + s.note }

// scale returns the tokens per column, a multiple of the smallest LeanTile, such that the longest schedule
// fits.
func scale(all []*schedule, columns int) int64 {
	least, longest := int64(all[0].Tile), int64(0)
	for _, s := range all {
		least, longest = min(least, int64(s.Tile)), max(longest, s.span()*int64(s.Tile))
	}
	width := int64(columns)
	return least * max(1, (longest+width*least-1)/(width*least))
}

// row draws the pieces of a worker in columns of the given number of tokens, up to end. A column shows the
// letter of the piece that fills most of it, or a dot if more than half of it is idle. The first column of a
// worker with any work is always a letter.
func row(s *schedule, pieces []piece, tokens, end int64) string {
	line := make([]byte, 0, columns)
	next, from, to := 0, int64(0), int64(0) // next piece, and the range of the current piece
	for at := int64(0); at < end; at += tokens {
		letter, most, busy := byte('.'), int64(0), int64(0)
		for {
			if n := min(to, at+tokens) - max(from, at); n > 0 {
				if busy += n; n > most {
					letter, most = pieces[next-1].letter(), n
				}
			}
			if to >= at+tokens || next == len(pieces) {
				break
			}
			from, to = to, to+pieces[next].len()*int64(s.Tile)
			next++
		}
		if at > 0 && 2*busy < min(tokens, end-at) {
			letter = '.'
		}
		line = append(line, letter)
	}
	return string(line)
}

// letter returns the letter of k's output tile.
func (k piece) letter() byte {
	if k.host() {
		return 'A' + byte(k.Output%26)
	}
	return 'a' + byte(k.Output%26)
}

// paint colours the letters of a line. Each output tile has one colour.
func paint(line string, colours bool) string {
	if !colours {
		return line
	}
	var b strings.Builder
	last := byte('.')
	for i := range len(line) {
		if c := line[i]; c != last {
			if last = c; c == '.' {
				b.WriteString("\x1b[0m")
			} else { // six standard colours; the bright variants mark the piece with the first LeanTile
				bright := 30
				if c < 'a' {
					bright = 90
				}
				fmt.Fprintf(&b, "\x1b[%dm", bright+1+int(c|0x20-'a')%6)
			}
		}
		b.WriteByte(line[i])
	}
	if last != '.' {
		b.WriteString("\x1b[0m")
	}
	return b.String()
}

// bytesOf formats a size with about three digits.
func bytesOf(n int64) string {
	switch {
	case n < 10<<10:
		return fmt.Sprintf("%d B", n)
	case n < 10<<20:
		return fmt.Sprintf("%d KB", (n+512)>>10)
	}
	return fmt.Sprintf("%d MB", (n+512<<10)>>20)
}
