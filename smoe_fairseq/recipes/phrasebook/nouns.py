"""Nouns, one row each.

Columns: English singular and plural (``-``: not counted); Northern Sotho singular and plural with
their noun classes; Malay word and classifier; Tagalog; Catalan singular, plural and gender; kinds.
"""

from smoe_fairseq.recipes.phrasebook.entries import Noun, read

_PEOPLE_AND_ANIMALS = """
teacher teachers    morutiši barutiši 1 2   guru orang      guro       mestre mestres m     person
child children      ngwana bana 1 2         budak orang     bata       nen nens m           person
man men             monna banna 1 2         lelaki orang    lalaki     home homes m         person
woman women         mosadi basadi 1 2       perempuan orang babae      dona dones f         person
student students    moithuti baithuti 1 2   pelajar orang   estudyante alumne alumnes m     person
friend friends      mogwera bagwera 1 2     kawan orang     kaibigan   amic amics m         person
doctor doctors      ngaka dingaka 9 10      doktor orang    doktor     metge metges m       person
farmer farmers      molemi balemi 1 2       petani orang    magsasaka  pagès pagesos m      person
worker workers      mošomi bašomi 1 2       pekerja orang   manggagawa obrer obrers m       person
guest guests        moeng baeng 1 2         tetamu orang    bisita     convidat convidats m person
policeman policemen lephodisa maphodisa 5 6 polis orang     pulis      policia policies m   person
king kings          kgoši dikgoši 9 10      raja orang      hari       rei reis m           person
dog dogs            mpša dimpša 9 10        anjing ekor     aso        gos gossos m         animal
cat cats            katse dikatse 9 10      kucing ekor     pusa       gat gats m           animal
cow cows            kgomo dikgomo 9 10      lembu ekor      baka       vaca vaques f        animal
goat goats          pudi dipudi 9 10        kambing ekor    kambing    cabra cabres f       animal
horse horses        pere dipere 9 10        kuda ekor       kabayo     cavall cavalls m     animal
chicken chickens    kgogo dikgogo 9 10      ayam ekor       manok      gallina gallines f   animal
bird birds          nonyana dinonyana 9 10  burung ekor     ibon       ocell ocells m       animal
pig pigs            kolobe dikolobe 9 10    babi ekor       baboy      porc porcs m         animal
elephant elephants  tlou ditlou 9 10        gajah ekor      elepante   elefant elefants m   animal
"""

_FOOD = """
bread -        borotho - 14 -       roti -      tinapay  pa - m           food
meat -         nama - 9 -           daging -    karne    carn - f         food
cheese -       tšhese - 9 -         keju -      keso     formatge - m     food
fish -         hlapi - 9 -          ikan -      isda     peix - m         food
egg eggs       lee mae 5 6          telur biji  itlog    ou ous m         food
apple apples   apola diapola 9 10   epal biji   mansanas poma pomes f     food,fruit
banana bananas panana dipanana 9 10 pisang biji saging   plàtan plàtans m food,fruit
water -        meetse - 6 -         air -       tubig    aigua - f        drink
milk -         maswi - 6 -          susu -      gatas    llet - f         drink
tea -          teye - 9 -           teh -       tsaa     te - m           drink
"""

_THINGS = """
book books       puku dipuku 9 10          buku buah     libro    llibre llibres m     thing,text
letter letters   lengwalo mangwalo 5 6     surat pucuk   liham    carta cartes f       thing,text
chair chairs     setulo ditulo 7 8         kerusi buah   silya    cadira cadires f     thing,solid
table tables     tafola ditafola 9 10      meja buah     mesa     taula taules f       thing,solid
car cars         koloi dikoloi 9 10        kereta buah   kotse    cotxe cotxes m       thing,solid
house houses     ntlo dintlo 9 10          rumah buah    bahay    casa cases f         building
door doors       lebati mabati 5 6         pintu buah    pinto    porta portes f       opening
window windows   lefasetere mafasetere 5 6 tingkap buah  bintana  finestra finestres f opening
box boxes        lepokisi mapokisi 5 6     kotak buah    kahon    caixa caixes f       thing,opening
bag bags         mokotla mekotla 3 4       beg buah      bag      bossa bosses f       thing,opening
hat hats         kefa dikefa 9 10          topi buah     sumbrero barret barrets m     thing
shirt shirts     hempe dihempe 9 10        baju helai    kamisa   camisa camises f     thing
cup cups         komiki dikomiki 9 10      cawan buah    tasa     tassa tasses f       thing,fragile
spoon spoons     lehwana mahwana 5 6       sudu batang   kutsara  cullera culleres f   thing
knife knives     thipa dithipa 9 10        pisau bilah   kutsilyo ganivet ganivets m   thing
key keys         senotlelo dinotlelo 7 8   kunci batang  susi     clau claus f         thing
picture pictures seswantšho diswantšho 7 8 gambar keping larawan  quadre quadres m     thing
tree trees       mohlare mehlare 3 4       pokok batang  puno     arbre arbres m       plant
flower flowers   letšoba matšoba 5 6       bunga kuntum  bulaklak flor flors f         plant
"""

NOUNS: dict[str, Noun] = read(_PEOPLE_AND_ANIMALS + _FOOD + _THINGS, Noun)
