package main

import (
	"flag"
	"fmt"
	"hash/crc32"
	"reflect"
	"slices"

	"gorgonia.org/leanattention/examples/opt/model"
)

// mayDiffer is the flags that ranks need not have alike: their contents are compared ([loaded.same]), or they change
// no text. All other flags must be alike.
var mayDiffer = []string{
	"model", "prompt", "prompts", "perplexity", // contents
	"prompt-cache", "device", // a path, and which GPUs; ranks.Join compares their number
	"stats", "json", // output besides the text
}

// sameFlags lists the flags that all ranks must have alike, with their values.
func sameFlags(f *flag.FlagSet) (list []string) {
	f.VisitAll(func(f *flag.Flag) {
		if !slices.Contains(mayDiffer, f.Name) {
			list = append(list, fmt.Sprintf("-%s %s", f.Name, f.Value))
		}
	})
	return list
}

// same lists what all ranks must have alike: flags, texts, configuration, tokenizer and weights.
func (l *loaded) same() ([]string, error) {
	o := &l.options
	list := slices.Clone(o.flags)
	for i, prompt := range o.prompts {
		list = append(list, fmt.Sprintf("prompt %d: %s", i+1, brief(prompt)))
	}
	if o.perplexity != "" {
		list = append(list, "text of -perplexity: "+brief(o.text))
	}
	config := reflect.ValueOf(l.config)
	for i := range config.NumField() {
		list = append(list, fmt.Sprintf("model's %s: %v", config.Type().Field(i).Name, config.Field(i)))
	}
	list = append(list, fmt.Sprintf("model's end of text: %v", l.folder.EOS()), fmt.Sprintf("tokenizer: %08x", l.tokenizer.Checksum()))
	weights, err := model.Checksums(l.folder, o.world)
	for _, w := range weights {
		list = append(list, "weight "+w)
	}
	return list, err
}

// brief returns a text, or the beginning of a long text with its length and checksum.
func brief(text string) string {
	const most, shown = 60, 30
	if len(text) <= most {
		return text
	}
	return fmt.Sprintf("%s... (%d bytes, %08x)", text[:shown], len(text), crc32.Checksum([]byte(text), crc32.MakeTable(crc32.Castagnoli)))
}
