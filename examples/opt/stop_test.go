package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/tiny"

	"pgregory.net/rapid"
)

// A text ends where the first stop text is complete, however it is cut into
// pieces, and nothing of that stop text is written.
func TestStopper(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Few letters, so that stop texts overlap each other and themselves.
		stops := rapid.SliceOfN(rapid.StringOfN(rapid.RuneFrom([]rune("abé")), 1, 5, -1), 0, 4).Draw(t, "stops")
		all := rapid.StringOfN(rapid.RuneFrom([]rune("abéè")), 0, 40, -1).Draw(t, "text")

		want, ends := all, false
		for end := 1; end <= len(all) && !ends; end++ {
			for _, stop := range stops {
				if rest, found := strings.CutSuffix(all[:end], stop); found && (!ends || len(rest) < len(want)) {
					want, ends = rest, true
				}
			}
		}

		s, got, ended := newStopper(stops), "", false
		for rest := []rune(all); len(rest) > 0 && !ended; {
			n := rapid.IntRange(0, len(rest)).Draw(t, "piece")
			var text string
			text, ended = s.add(string(rest[:n]), "")
			got, rest = got+text, rest[n:]
			if !strings.HasPrefix(want, got) {
				t.Fatalf("wrote %q of %q", got, want)
			}
		}
		if got += s.flush(); got != want || ended != ends {
			t.Fatalf("%q by %q: %q, ended %v, want %q, %v", all, stops, got, ended, want, ends)
		}
	})
}

// A stop text with the name of a special token in it is found where the token comes,
// which itself has no text, and all other texts are found as if the token were not
// there.
func TestStopperSpecial(t *testing.T) {
	names := []string{"<a>", "<>", "b"}
	rapid.Check(t, func(t *rapid.T) {
		letters := rapid.StringOfN(rapid.RuneFrom([]rune("ab<>")), 1, 3, -1)
		part := rapid.OneOf(letters, rapid.SampledFrom(names))
		var stops []string
		for range rapid.IntRange(1, 3).Draw(t, "stops") {
			stops = append(stops, strings.Join(rapid.SliceOfN(part, 1, 3).Draw(t, "stop"), ""))
		}
		type token struct{ text, special string }
		var tokens []token
		for range rapid.IntRange(0, 20).Draw(t, "tokens") {
			if rapid.Bool().Draw(t, "special") {
				tokens = append(tokens, token{special: rapid.SampledFrom(names).Draw(t, "name")})
			} else {
				tokens = append(tokens, token{text: rapid.StringOfN(rapid.RuneFrom([]rune("ab<>")), 0, 3, -1).Draw(t, "text")})
			}
		}

		// Of each byte that comes: the token, and whether it is text or where in a name.
		type place struct {
			b          byte
			token      int
			name       bool
			begin, end bool // of a name
		}
		want, before, ends := "", 0, false
		find := func(come []place, stop string) (text, first int, ok bool) {
			n := len(stop)
			if n > len(come) {
				return 0, 0, false
			}
			match := come[len(come)-n:]
			for i, p := range match {
				if p.b != stop[i] || p.name && (i == 0 && !p.begin || i == n-1 && !p.end) {
					return 0, 0, false
				}
				if !p.name {
					text++
				}
			}
			return text, match[0].token, true
		}
		plain, named := []place{}, make([][]place, len(stops))
		check := func() {
			longest := -1
			for i, stop := range stops {
				for _, come := range [][]place{plain, named[i]} {
					if text, first, ok := find(come, stop); ok && text > longest {
						longest, before, ends = text, first, true
					}
				}
			}
			if ends {
				want = want[:len(want)-longest]
			}
		}
		for i, x := range tokens {
			for j := 0; j < len(x.text) && !ends; j++ {
				p := place{b: x.text[j], token: i}
				want += x.text[j : j+1]
				plain = append(plain, p)
				for k := range stops {
					named[k] = append(named[k], p)
				}
				check()
			}
			if x.special == "" || ends {
				continue
			}
			for k, stop := range stops {
				for j := 0; strings.Contains(stop, x.special) && j < len(x.special); j++ {
					named[k] = append(named[k], place{x.special[j], i, true, j == 0, j == len(x.special)-1})
				}
			}
			// The plain text was looked at before.
			was := plain
			plain = nil
			check()
			plain = was
		}

		s, got, ended := newStopper(stops), "", false
		for _, x := range tokens {
			var text string
			text, ended = s.add(x.text, x.special)
			if got += text; !strings.HasPrefix(want, got) {
				t.Fatalf("wrote %q of %q", got, want)
			}
			if ended {
				break
			}
		}
		if got += s.flush(); got != want || ended != ends || ended && s.at != before {
			t.Fatalf("%q by %q: %q, ended %v, %d tokens before it, want %q, %v, %d", tokens, stops, got, ended, s.at, want, ends, before)
		}
	})
}

// What can't be the beginning of a stop text is not held back, and a long stop text
// takes no longer than a short one.
func TestStopperHolds(t *testing.T) {
	s := newStopper([]string{"\nQuestion", "aab"})
	for _, step := range []struct{ piece, want string }{
		{"one\n", "one"}, {"Qu", ""}, {"ick", "\nQuick"}, {"a", ""}, {"a", ""}, {"a", "a"}, {"c", "aac"},
	} {
		if got, ended := s.add(step.piece, ""); got != step.want || ended {
			t.Errorf("%q: %q, %v, want %q", step.piece, got, ended, step.want)
		}
	}
	if got, ended := s.add("a", ""); got != "" || ended || s.flush() != "a" {
		t.Errorf("a beginning at the end is lost")
	}

	s = newStopper([]string{strings.Repeat("a", 1<<16) + "b"})
	n := 0
	for range 1 << 17 { // quadratic, this would be 8e9 steps
		text, _ := s.add("a", "")
		n += len(text)
	}
	if n += len(s.flush()); n != 1<<17 {
		t.Errorf("%d letters", n)
	}
}

// specialModel is the shipped model, whose token "." is the special token <|im_end|>.
func specialModel(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, tiny.Files); err != nil {
		t.Fatal(err)
	}
	change := func(file string, change func(string) string) {
		t.Helper()
		name := filepath.Join(dir, file)
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text := change(string(data))
		if text == string(data) {
			t.Fatalf("%s has not changed", file)
		}
		if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	change("vocab.json", func(s string) string {
		var vocab map[string]int
		if err := json.Unmarshal([]byte(s), &vocab); err != nil {
			t.Fatal(err)
		}
		vocab["<|im_end|>"] = vocab["."]
		delete(vocab, ".")
		data, err := json.Marshal(vocab)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	})
	change("merges.txt", func(s string) string {
		lines := strings.Split(s, "\n")
		return strings.Join(slices.DeleteFunc(lines, func(line string) bool { return slices.Contains(strings.Fields(line), ".") }), "\n")
	})
	change("tokenizer_config.json", func(s string) string {
		return strings.Replace(s, "{", `{"additional_special_tokens": ["<|im_end|>"],`, 1)
	})
	return dir
}

// TestStopSpecial: -stop with the name of a special token ends a text where the token
// comes, though it has no text.
func TestStopSpecial(t *testing.T) {
	dir := specialModel(t)
	ids := []int{440, 293, 262, 926, 1436, 456, 1242, 315, 263, 1152, 17}
	args := []string{"-model", dir, "-prompt", "Once upon a time", "-n", "16"}
	all := jsonOf(t, args...).Texts[0]
	if len(all.Tokens) != 16 || !slices.Equal(all.Tokens[:11], ids) || strings.Contains(all.Text, "im_end") {
		t.Fatalf("without -stop: %+v", all)
	}
	tokenizer, err := tokenizer.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	text, rest := tokenizer.Decode(ids), tokenizer.Decode(all.Tokens[:12])[len(tokenizer.Decode(ids)):]
	for _, c := range []struct {
		stop, text string
		tokens     int // 16: it runs to its end
	}{
		{"<|im_end|>", text, 11},
		{text[len(text)-1:] + "<|im_end|>", text[:len(text)-1], 11},
		{text + "<|im_end|>", "", 11},
		{"<|im_end|>" + rest, text, 12},
		{text[len(text)-3:] + "<|im_end|>" + rest[:1], text[:len(text)-3], 12},
		{text[len(text)-3:] + rest[:1], text[:len(text)-3], 12}, // as if the token were not there
		{"im_end", all.Text, 16},
		{"<|im_end|", all.Text, 16},
		{"|im_end|>", all.Text, 16},
		{"</s>", all.Text, 16},
		{"<|im_end|>" + rest + "?", all.Text, 16},
	} {
		args := append([]string{"-stop", "never", "-stop", c.stop}, args...)
		x := jsonOf(t, args...).Texts[0]
		reason := "stop"
		if c.tokens == 16 {
			reason = "length"
		}
		if x.Text != c.text || x.Reason != reason || !slices.Equal(x.Tokens, all.Tokens[:c.tokens]) {
			t.Errorf("-stop %q: %+v, want %+v", c.stop, x, c)
		}
		if _, plain, _ := command(t, args...); plain != c.text+"\n" {
			t.Errorf("-stop %q wrote %q, want %q", c.stop, plain, c.text)
		}
		// In a session the context is what is on the screen, and goes on from there.
		s := newConversation(t, false, "-model", dir, "-n", "16", "-stop", c.stop)
		if got := s.text("Once upon a time"); got != c.text {
			t.Errorf("-i -stop %q wrote %q, want %q", c.stop, got, c.text)
		}
		prompt := idsOf(t, tokenizer, "Once upon a time", false)
		want := slices.Concat(prompt, all.Tokens)
		if c.tokens < 16 {
			want = slices.Concat(prompt, ids[:10])
			if c.text != text {
				want = append(prompt, idsOf(t, tokenizer, c.text, true)...)
			}
		}
		if got := tokenizer.Decode(s.context); got != "Once upon a time"+c.text || slices.Contains(s.context, 17) != (c.tokens == 16) || c.text == text && !slices.Equal(s.context, want) {
			t.Errorf("-i -stop %q: the context is %q %v, want %v", c.stop, got, s.context, want)
		}
		checkDecoder(t, s)
	}
}

// TestStopEnd: the token that ends a text may end a stop text, too.
func TestStopEnd(t *testing.T) {
	dir := writeModel(t, nil)
	all := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "40").Texts[0]
	end := 1
	for strings.IndexByte(all.Text, all.Text[end]) < end {
		end++ // to the first letter that is not there before
	}
	eos := all.Tokens[end]
	for _, special := range []bool{true, false} {
		dir := writeModel(t, func(c map[string]any) { c["eos_token_id"] = eos })
		name := all.Text[end : end+1]
		if special { // the letter's token is called <end>
			vocab, err := os.ReadFile(filepath.Join(dir, "vocab.json"))
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, "vocab.json"), bytes.Replace(vocab, []byte(`"`+name+`":`), []byte(`"<end>":`), 1), 0o666)
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, "tokenizer_config.json"), []byte(`{"eos_token": "<end>", "bos_token": "</s>", "unk_token": "</s>", "add_bos_token": true}`), 0o666)
			}
			if err != nil {
				t.Fatal(err)
			}
			name = "<end>"
		}
		for _, c := range []struct {
			stop, text, reason string
			tokens             int
		}{
			{"never", all.Text[:end], "eos", end},
			{name, all.Text[:end], "eos", end},
			{all.Text[end-1:end] + name, all.Text[:end-1], "stop", end + 1},
			{all.Text[:end] + name, "", "stop", end + 1},
			{all.Text[end-1:end] + name + "a", all.Text[:end], "eos", end},
		} {
			x := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "40", "-stop", c.stop, "-logprobs", "1").Texts[0]
			if x.Text != c.text || x.Reason != c.reason || len(x.Tokens) != c.tokens || len(x.Logprobs) != c.tokens {
				t.Errorf("special %v, -stop %q: %+v, want %+v", special, c.stop, x, c)
			}
			s := newConversation(t, false, "-model", dir, "-n", "40", "-stop", c.stop)
			if got := s.text("abc"); got != c.text || s.l.tokenizer.Decode(s.context) != "abc"+c.text || slices.Contains(s.context, eos) {
				t.Errorf("special %v, -i -stop %q: %q, context %v", special, c.stop, got, s.context)
			}
		}
	}
}

// TestUnkIsOrdinary: a token is not hidden for its name alone.
func TestUnkIsOrdinary(t *testing.T) {
	dir := writeModel(t, nil)
	all := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "8").Texts[0]
	name := filepath.Join(dir, "vocab.json")
	vocab, err := os.ReadFile(name)
	if err == nil {
		text := strings.Replace(string(vocab), `"\u003cunk\u003e":`, `"other":`, 1)
		text = strings.Replace(text, `"`+all.Text[:1]+`":`, `"<unk>":`, 1)
		err = os.WriteFile(name, []byte(text), 0o666)
	}
	if err != nil {
		t.Fatal(err)
	}
	want := strings.ReplaceAll(all.Text, all.Text[:1], "<unk>")
	prompt := strings.ReplaceAll("abc", all.Text[:1], "")
	if prompt != "abc" {
		t.Skip("the prompt has the letter")
	}
	if x := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "8").Texts[0]; x.Text != want || !slices.Equal(x.Tokens, all.Tokens) {
		t.Errorf("%+v, want %q", x, want)
	}
	if x := jsonOf(t, "-model", dir, "-prompt", "abc", "-n", "8", "-stop", "<unk>").Texts[0]; x.Text != "" || x.Reason != "stop" {
		t.Errorf("-stop: %+v", x)
	}
}
